"""Small records as DUMP writes them, and the encodings that Redis would choose for them."""

from libc.stdint cimport int64_t, uint8_t, uint64_t
from libc.string cimport strlen

from resp_server.native.arguments cimport is_number
from resp_server.native.records cimport (
    ANSWERED, GENERAL, SHORT_LIST, SMALL_MAP, SMALL_SET, SMALL_SORTED_SET, VALUE, Item, Record, items_start, next_item, size_of
)
from resp_server.native.wire cimport NUMBER_LINE_BYTES, Output, Word, insert, put, put_bulk, write_line
from state_backend.native.little_endian cimport u64

# Redis' limits of compact encodings (see `commands.object`).
cdef enum:
    EMBEDDED_BYTES_MAX = 44
    COMPACT_ITEMS_MAX = 128
    COMPACT_ITEM_BYTES_MAX = 64
    COMPACT_LIST_BYTES_MAX = 8192
    NUMBERS_MAX = 512

# The checksums of RDB: of each byte, and of each byte before up to seven zeros.
ctypedef uint64_t[256] Checksums


cdef inline int put_rdb_length(Output* out, size_t number) except -1:
    cdef uint8_t bytes_[5]
    cdef int size = 1 if number < 1 << 6 else 2 if number < 1 << 14 else 5, i
    for i in range(size):
        bytes_[size - 1 - i] = <uint8_t>(number >> 8 * i)
    if size > 1:
        bytes_[0] = bytes_[0] | 0x40 if size == 2 else 0x80
    return put(out, bytes_, size)


cdef inline uint64_t checksum_of(const char* text, size_t size, const Checksums* checksums) noexcept nogil:
    """Return the CRC-64 of a text, eight bytes at a time."""
    cdef uint64_t checksum = 0
    cdef size_t at = 0, i
    cdef uint64_t block
    while size - at >= 8:
        block, checksum = checksum ^ u64(<const uint8_t*>text + at), 0
        for i in range(8):
            checksum ^= checksums[7 - i][block >> 8 * i & 0xFF]
        at += 8
    for at in range(at, size):
        checksum = checksums[0][(checksum ^ <uint8_t>text[at]) & 0xFF] ^ checksum >> 8
    return checksum


cdef inline int put_dump(Output* out, const Record* record, const Checksums* checksums) except -2:
    """Write a small record in the format of RDB (see `protocol.rdb_encoder`)."""
    # The types of records by their forms.
    cdef uint8_t[5] types = [0, 4, 1, 2, 5]
    cdef size_t before = out.used, at
    cdef char head[NUMBER_LINE_BYTES]
    cdef int64_t count = size_of(record), i
    cdef uint64_t checksum
    cdef Item item
    if record.form > SMALL_SORTED_SET or not 0 <= count:
        return GENERAL
    put(out, &types[record.form], 1)
    put_rdb_length(out, count)
    if record.form == VALUE:
        put(out, record.payload, record.size)
        count = 0
    at = items_start(record) if count else 0
    for i in range(2 * count if record.form == SMALL_MAP else count):
        if next_item(record, i, &at, &item) == GENERAL:
            return GENERAL
        put_rdb_length(out, item.size)
        put(out, item.at, item.size)
        if record.form == SMALL_SORTED_SET:
            put(out, &item.score, 8)
    put(out, b"\x0a\0", 2)  # the version of RDB
    checksum = checksum_of(out.data + before, out.used - before, checksums)
    put(out, &checksum, 8)
    put(out, b"\r\n", 2)
    return insert(out, before, head, write_line(head, c"$", out.used - before - 2)) + ANSWERED


cdef inline int put_encoding(Output* out, const Record* record) except -2:
    """Write the encoding that Redis would choose for a small record (see `commands.object`)."""
    cdef int64_t count, i
    cdef size_t at = 0, bytes_ = 0
    cdef bint has_long = False, has_text = False
    cdef const char* name = b"listpack"
    cdef Word word
    cdef Item item
    if record.form == VALUE:
        word.at, word.size = record.payload, record.size
        name = b"int" if is_number(&word) else b"embstr" if record.size <= EMBEDDED_BYTES_MAX else b"raw"
        return put_bulk(out, name, strlen(name)) + ANSWERED
    count = size_of(record)
    if record.form > SMALL_SORTED_SET or count <= 0:
        return GENERAL
    at = items_start(record)
    for i in range(2 * count if record.form == SMALL_MAP else count):
        if next_item(record, i, &at, &item) == GENERAL:
            return GENERAL
        word.at, word.size = item.at, item.size
        has_long |= item.size > COMPACT_ITEM_BYTES_MAX
        has_text |= not is_number(&word)
        bytes_ += item.size + 2
    if record.form == SHORT_LIST:
        name = b"listpack" if bytes_ < COMPACT_LIST_BYTES_MAX and count <= COMPACT_LIST_BYTES_MAX // 2 else b"quicklist"
    elif record.form == SMALL_SET and not has_text:
        if count > NUMBERS_MAX:
            return GENERAL
        name = b"intset"
    elif has_long or (record.form != SMALL_MAP and count > COMPACT_ITEMS_MAX):
        name = b"skiplist" if record.form == SMALL_SORTED_SET else b"hashtable"
    return put_bulk(out, name, strlen(name)) + ANSWERED
