# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The hot loops of making change records of Arrow columns: the texts of integers, keys, their positions and order, and
packed maps.

`state_backend.codec.column_text` and `row_encoding` have the same in Arrow and numpy, and `slots` and `packed_map` the
formats. A column of bytes is given as the offsets of its values and their content, as in Arrow. Every offset is checked
before it is used.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memchr, memcpy, memset

cdef enum:
    HASH_BITS = 32
    SLOT_MASK = 16383
    NUMBER_BYTES_MAX = 10
    INTEGER_BYTES_MAX = 20
    ROW_BITS = 16
    WORD_BYTES = 8

cdef uint16_t crc16_table[256]
cdef uint32_t crc32_table[256]
cdef uint8_t pairs[200]  # the digits of 00 to 99


cdef void make_tables() noexcept:
    """Make the tables of CRC16/XMODEM, which Redis Cluster uses, of zlib's CRC32, and of decimal digits."""
    cdef uint32_t low, high
    cdef int byte, bit
    for byte in range(256):
        high, low = <uint32_t>byte << 8, <uint32_t>byte
        for bit in range(8):
            high = ((high << 1) ^ 0x1021u if high & 0x8000u else high << 1) & 0xFFFFu
            low = (low >> 1) ^ (0xEDB88320u if low & 1 else 0u)
        crc16_table[byte], crc32_table[byte] = <uint16_t>high, low
    for byte in range(100):
        pairs[2 * byte], pairs[2 * byte + 1] = ord("0") + byte // 10, ord("0") + byte % 10


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
    """Return the positions of keys, as u64; see `row_encoding.hash_positions_of`. prefix_bytes: all keys begin alike."""
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


cdef struct Column:
    const uint8_t* head
    const int32_t* offsets
    const uint8_t* content
    const uint8_t* is_valid
    int64_t head_bytes


def order_of(const uint64_t[:] positions):
    """Return sorted positions, as u64, and the rows that they come from, as u16; rows of one position keep their order.

    There are at most 2^16 positions of 46 bits. A word has the position, and the row in its lower bits; the words are
    sorted by one byte after the other, from the lowest byte of the position on.
    """
    cdef int64_t rows = positions.shape[0], row, at, total, size
    cdef int byte
    cdef uint64_t word
    cdef int64_t counts[WORD_BYTES][256]
    cdef int64_t* count
    if rows > 1 << ROW_BITS:
        raise ValueError("a run has more rows than 16 bits can number")
    cdef bytes found_positions = PyBytes_FromStringAndSize(NULL, 8 * rows)
    cdef bytes found_rows = PyBytes_FromStringAndSize(NULL, 2 * rows)
    cdef uint64_t* positions_at = <uint64_t*>PyBytes_AS_STRING(found_positions)
    cdef uint16_t* rows_at = <uint16_t*>PyBytes_AS_STRING(found_rows)
    cdef uint64_t* words = <uint64_t*>malloc(2 * 8 * max(1, rows))
    cdef uint64_t* source = words
    cdef uint64_t* target = words + rows
    if words == NULL:
        raise MemoryError
    memset(counts, 0, sizeof(counts))
    for row in range(rows):
        word = positions[row] << ROW_BITS | <uint64_t>row
        source[row] = word
        for byte in range(ROW_BITS // 8, WORD_BYTES):
            counts[byte][(word >> (8 * byte)) & 0xFF] += 1
    for byte in range(ROW_BITS // 8, WORD_BYTES):
        count = counts[byte]
        if rows and count[(source[0] >> (8 * byte)) & 0xFF] == rows:
            continue  # all words have the same byte here
        total = 0
        for at in range(256):
            size = count[at]
            count[at] = total
            total += size
        for row in range(rows):
            word = source[row]
            at = (word >> (8 * byte)) & 0xFF
            target[count[at]] = word
            count[at] += 1
        source, target = target, source
    for row in range(rows):
        positions_at[row] = source[row] >> ROW_BITS
        rows_at[row] = <uint16_t>source[row]
    free(words)
    return found_positions, found_rows


def integer_texts(const int64_t[:] numbers, const uint8_t[:] validity=None):
    """Return the decimal digits of numbers: the offsets of the texts, as i32, and their content, which may be longer.

    validity: a byte for each row, which is 0 for null; None if there is no null.
    """
    cdef int64_t rows = numbers.shape[0], row
    cdef uint64_t number
    cdef uint8_t digits[INTEGER_BYTES_MAX]
    cdef int first
    if validity is not None and validity.shape[0] != rows:
        raise ValueError("a column has another number of rows")
    if rows > INT32_MAX // INTEGER_BYTES_MAX:
        raise OverflowError("the texts are longer than an Arrow array can be")
    cdef bytes ends_result = PyBytes_FromStringAndSize(NULL, 4 * (rows + 1))
    cdef bytes result = PyBytes_FromStringAndSize(NULL, INTEGER_BYTES_MAX * rows)
    cdef int32_t* ends = <int32_t*>PyBytes_AS_STRING(ends_result)
    cdef uint8_t* begin = <uint8_t*>PyBytes_AS_STRING(result)
    cdef uint8_t* at = begin
    ends[0] = 0
    for row in range(rows):
        if validity is None or validity[row]:
            number = <uint64_t>numbers[row]
            if numbers[row] < 0:
                number = 0 - number
                at[0] = ord("-")
                at += 1
            first = INTEGER_BYTES_MAX
            while number >= 100:
                first -= 2
                memcpy(digits + first, pairs + 2 * (number % 100), 2)
                number //= 100
            if number >= 10:
                first -= 2
                memcpy(digits + first, pairs + 2 * number, 2)
            else:
                first -= 1
                digits[first] = ord("0") + <uint8_t>number
            memcpy(at, digits + first, INTEGER_BYTES_MAX - first)
            at += INTEGER_BYTES_MAX - first
        ends[row + 1] = <int32_t>(at - begin)
    return ends_result, result


def joined(list parts, int64_t rows):
    """Return each row's parts as one text: the offsets of the texts, as i32, and their content.

    parts: of each either the bytes that are the same in all rows, or (offsets, content).
    """
    cdef int64_t count = len(parts), place, row, total = 0, size
    cdef const int32_t[:] offsets
    cdef const uint8_t[:] content
    cdef Column* found = <Column*>malloc(max(1, count) * sizeof(Column))
    cdef Column* column
    cdef bytes result, ends_result
    cdef uint8_t* at
    cdef int32_t* ends
    cdef list kept = []
    if found == NULL:
        raise MemoryError
    try:
        for place in range(count):
            column = found + place
            column.offsets = NULL
            if isinstance(parts[place], bytes):
                column.head = <const uint8_t*>PyBytes_AS_STRING(parts[place])
                column.head_bytes = len(parts[place])
                total += rows * column.head_bytes
                continue
            given_offsets, given_content = parts[place]
            offsets, content = given_offsets, given_content
            kept.append((offsets, content))
            if offsets.shape[0] != rows + 1:
                raise ValueError("a column has another number of rows")
            check_offsets(offsets, content.shape[0])
            column.offsets = &offsets[0]
            column.content = &content[0] if content.shape[0] else NULL
            total += offsets[rows] - offsets[0]
        if total > INT32_MAX:
            raise OverflowError("the texts are longer than an Arrow array can be")
        result = PyBytes_FromStringAndSize(NULL, total)
        ends_result = PyBytes_FromStringAndSize(NULL, 4 * (rows + 1))
        at = <uint8_t*>PyBytes_AS_STRING(result)
        ends = <int32_t*>PyBytes_AS_STRING(ends_result)
        ends[0] = 0
        for row in range(rows):
            for place in range(count):
                column = found + place
                if column.offsets == NULL:
                    memcpy(at, column.head, column.head_bytes)
                    at += column.head_bytes
                else:
                    size = column.offsets[row + 1] - column.offsets[row]
                    memcpy(at, column.content + column.offsets[row], size)
                    at += size
            ends[row + 1] = <int32_t>(at - <uint8_t*>PyBytes_AS_STRING(result))
        return ends_result, result
    finally:
        free(found)


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
