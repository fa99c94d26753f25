# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The hot loops of making change records of Arrow columns: the positions of keys, and packed maps.

`state_backend.codec.row_encoding` has the same in numpy, and `slots` and `packed_map` the formats. A column of bytes is
given as the offsets of its values and their content, as in Arrow. Every offset is checked before it is used.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memchr, memcpy

cdef enum:
    HASH_BITS = 32
    SLOT_MASK = 16383
    NUMBER_BYTES_MAX = 10

cdef uint16_t crc16_table[256]
cdef uint32_t crc32_table[256]


cdef void make_tables() noexcept:
    """Make the tables of CRC16/XMODEM, which Redis Cluster uses, and of zlib's CRC32."""
    cdef uint32_t low, high
    cdef int byte, bit
    for byte in range(256):
        high, low = <uint32_t>byte << 8, <uint32_t>byte
        for bit in range(8):
            high = ((high << 1) ^ 0x1021u if high & 0x8000u else high << 1) & 0xFFFFu
            low = (low >> 1) ^ (0xEDB88320u if low & 1 else 0u)
        crc16_table[byte], crc32_table[byte] = <uint16_t>high, low


make_tables()


cdef inline uint16_t crc16_of(uint16_t crc, const uint8_t* at, int64_t size) noexcept nogil:
    cdef int64_t byte
    for byte in range(size):
        crc = <uint16_t>(crc << 8) ^ crc16_table[(crc >> 8) ^ at[byte]]
    return crc


cdef inline bint find_tag(const uint8_t* key, int64_t size, const uint8_t** tag, int64_t* tag_size) noexcept nogil:
    """Find the hash tag of a key: what is between its first `{` and the first `}` after that, if it is not empty."""
    cdef const uint8_t* begin = <const uint8_t*>memchr(key, ord("{"), size)
    cdef const uint8_t* end
    if begin == NULL:
        return False
    begin += 1
    end = <const uint8_t*>memchr(begin, ord("}"), size - (begin - key))
    if end == NULL or end == begin:
        return False
    tag[0], tag_size[0] = begin, end - begin
    return True


cdef int check_offsets(const int32_t[:] offsets, int64_t size) except -1:
    cdef int64_t row
    if offsets.shape[0] < 1 or offsets[0] < 0 or offsets[offsets.shape[0] - 1] > size:
        raise ValueError("an offset is outside of the content")
    for row in range(1, offsets.shape[0]):
        if offsets[row] < offsets[row - 1]:
            raise ValueError("offsets do not ascend")
    return 0


def positions(const int32_t[:] offsets, const uint8_t[:] content, int64_t prefix_bytes):
    """Return the positions of keys, as u64; see `row_encoding.positions_of`. prefix_bytes: all keys begin alike."""
    cdef int64_t rows = offsets.shape[0] - 1, row, size, byte, tag_size
    cdef const uint8_t* data = &content[0] if content.shape[0] else NULL
    cdef const uint8_t* key
    cdef const uint8_t* tag
    cdef uint16_t prefix16 = 0, crc16
    cdef uint32_t prefix32 = 0xFFFFFFFFu, crc32
    check_offsets(offsets, content.shape[0])
    cdef bytes result = PyBytes_FromStringAndSize(NULL, 8 * rows)
    cdef uint64_t* found = <uint64_t*>PyBytes_AS_STRING(result)
    for row in range(rows):
        key, size = data + offsets[row], offsets[row + 1] - offsets[row]
        if size < prefix_bytes:
            raise ValueError("a key is shorter than the prefix of all keys")
        if row == 0:
            prefix16 = crc16_of(0, key, prefix_bytes)
            for byte in range(prefix_bytes):
                prefix32 = (prefix32 >> 8) ^ crc32_table[(prefix32 ^ key[byte]) & 0xFF]
        crc16, crc32 = prefix16, prefix32
        for byte in range(prefix_bytes, size):
            crc16 = <uint16_t>(crc16 << 8) ^ crc16_table[(crc16 >> 8) ^ key[byte]]
            crc32 = (crc32 >> 8) ^ crc32_table[(crc32 ^ key[byte]) & 0xFF]
        if size and find_tag(key, size, &tag, &tag_size):
            crc16 = crc16_of(0, tag, tag_size)
        found[row] = <uint64_t>(crc16 & SLOT_MASK) << HASH_BITS | (crc32 ^ 0xFFFFFFFFu)
    return result


cdef struct Column:
    const uint8_t* head
    const int32_t* offsets
    const uint8_t* content
    const uint8_t* is_valid
    int64_t head_bytes


cdef inline int digits_of(uint32_t number) noexcept nogil:
    cdef int digits = 1
    while number >= 10:
        number //= 10
        digits += 1
    return digits


cdef inline uint8_t* with_number(uint8_t* at, uint32_t number, int digits) noexcept nogil:
    cdef int place
    for place in range(digits - 1, -1, -1):
        at[place] = ord("0") + number % 10
        number //= 10
    return at + digits


def packed_maps(list heads, list columns, int64_t rows):
    """Return packed maps: the offsets of each map as i32, their content, and for each whether it is empty.

    heads: for each column its field as a bulk string, and the `$` of its value. columns: (offsets, content, validity: a
    byte for each row, which is 0 for null, or None).
    """
    cdef int64_t count = len(heads), place, row, total = 0, size
    cdef const int32_t[:] offsets
    cdef const uint8_t[:] content
    cdef const uint8_t[:] validity
    cdef Column* found = <Column*>malloc(max(1, count) * sizeof(Column))
    cdef Column* column
    cdef bytes result, ends_result, empty_result
    cdef uint8_t* at
    cdef uint8_t* number_at
    cdef uint8_t* first_pair
    cdef uint8_t* is_empty
    cdef int32_t* ends
    cdef uint16_t present
    cdef uint32_t offset
    cdef list kept = []
    if found == NULL:
        raise MemoryError
    try:
        for place in range(count):
            given_offsets, given_content, given_validity = columns[place]
            offsets, content = given_offsets, given_content
            kept.append((offsets, content))
            if offsets.shape[0] != rows + 1:
                raise ValueError("a column has another number of rows")
            check_offsets(offsets, content.shape[0])
            column = found + place
            column.head = <const uint8_t*>PyBytes_AS_STRING(heads[place])
            column.head_bytes = len(heads[place])
            column.offsets = &offsets[0]
            column.content = &content[0] if content.shape[0] else NULL
            column.is_valid = NULL
            if given_validity is not None:
                validity = given_validity
                kept.append(validity)
                if validity.shape[0] != rows:
                    raise ValueError("a column has another number of rows")
                column.is_valid = &validity[0] if rows else NULL
            # The count, the offset, the length, and two ends of lines; the value comes on top.
            total += rows * (4 + column.head_bytes + NUMBER_BYTES_MAX + 4) + offsets[rows] - offsets[0]
        total += 2 * rows
        if total > INT32_MAX:
            raise OverflowError("the maps are longer than an Arrow array can be")
        result = PyBytes_FromStringAndSize(NULL, total)
        ends_result = PyBytes_FromStringAndSize(NULL, 4 * (rows + 1))
        empty_result = PyBytes_FromStringAndSize(NULL, rows)
        at = <uint8_t*>PyBytes_AS_STRING(result)
        ends = <int32_t*>PyBytes_AS_STRING(ends_result)
        is_empty = <uint8_t*>PyBytes_AS_STRING(empty_result)
        ends[0] = 0
        for row in range(rows):
            present = 0
            for place in range(count):
                present += found[place].is_valid == NULL or found[place].is_valid[row] != 0
            memcpy(at, &present, 2)
            number_at = at + 2
            at = first_pair = number_at + 4 * present
            for place in range(count):
                column = found + place
                if column.is_valid != NULL and column.is_valid[row] == 0:
                    continue
                offset = <uint32_t>(at - first_pair)
                memcpy(number_at, &offset, 4)
                number_at += 4
                memcpy(at, column.head, column.head_bytes)
                at += column.head_bytes
                size = column.offsets[row + 1] - column.offsets[row]
                at = with_number(at, <uint32_t>size, digits_of(<uint32_t>size))
                at[0], at[1] = ord("\r"), ord("\n")
                memcpy(at + 2, column.content + column.offsets[row], size)
                at += 2 + size
                at[0], at[1] = ord("\r"), ord("\n")
                at += 2
            is_empty[row] = present == 0
            ends[row + 1] = <int32_t>(at - <uint8_t*>PyBytes_AS_STRING(result))
        return ends_result, result, empty_result
    finally:
        free(found)
