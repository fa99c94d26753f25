# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The hot loops of reading Spark's state files: checksums, the positions of records, their bytes, the numbers of keys.

`state_backend.checkpoint.hashes`, `.records`, `.unsafe_rows` and `.key_numbers` have the same in Python, and the
formats. Every size is checked against the buffer before it is used.
"""

import os

from cpython.bytes cimport PyBytes_FromStringAndSize, PyBytes_AS_STRING
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcmp, memcpy

cdef enum:
    PUT = 1
    DELETE = 16
    MERGE = 17

cdef uint32_t P1 = 0x9E3779B1u
cdef uint32_t P2 = 0x85EBCA77u
cdef uint32_t P3 = 0xC2B2AE3Du
cdef uint32_t P4 = 0x27D4EB2Fu
cdef uint32_t P5 = 0x165667B1u
cdef uint32_t crc_table[256]


cdef void make_crc_table() noexcept:
    cdef uint32_t crc
    cdef int byte, bit
    for byte in range(256):
        crc = <uint32_t>byte
        for bit in range(8):
            crc = (crc >> 1) ^ (0x82F63B78u if crc & 1 else 0u)
        crc_table[byte] = crc


make_crc_table()


cdef inline uint32_t rotated(uint32_t word, int bits) noexcept nogil:
    return (word << bits) | (word >> (32 - bits))


cdef inline uint32_t little(const uint8_t* at) noexcept nogil:
    cdef uint32_t word
    memcpy(&word, at, 4)
    return word


cdef inline int32_t big(const uint8_t* at) noexcept nogil:
    return <int32_t>(
        (<uint32_t>at[0] << 24) | (<uint32_t>at[1] << 16) | (<uint32_t>at[2] << 8) | <uint32_t>at[3]
    )


def xxhash32(bytes data, uint32_t seed):
    """Return XXH32 of bytes."""
    cdef const uint8_t* at = <const uint8_t*>PyBytes_AS_STRING(data)
    cdef int64_t size = len(data)
    cdef const uint8_t* end = at + size
    cdef uint32_t a, b, c, d, total
    if size >= 16:
        a = seed + P1 + P2
        b = seed + P2
        c = seed
        d = seed - P1
        while end - at >= 16:
            a = rotated(a + little(at) * P2, 13) * P1
            b = rotated(b + little(at + 4) * P2, 13) * P1
            c = rotated(c + little(at + 8) * P2, 13) * P1
            d = rotated(d + little(at + 12) * P2, 13) * P1
            at += 16
        total = rotated(a, 1) + rotated(b, 7) + rotated(c, 12) + rotated(d, 18)
    else:
        total = seed + P5
    total += <uint32_t>size
    while end - at >= 4:
        total = rotated(total + little(at) * P3, 17) * P4
        at += 4
    while at < end:
        total = rotated(total + at[0] * P5, 11) * P1
        at += 1
    total = (total ^ (total >> 15)) * P2
    total = (total ^ (total >> 13)) * P3
    return total ^ (total >> 16)


def crc32c(bytes data, uint32_t crc=0):
    """Return CRC-32C of bytes; crc: that of the bytes before."""
    cdef const uint8_t* at = <const uint8_t*>PyBytes_AS_STRING(data)
    cdef const uint8_t* end = at + len(data)
    crc = ~crc
    while at < end:
        crc = crc_table[(crc ^ at[0]) & 0xFF] ^ (crc >> 8)
        at += 1
    return <uint32_t>~crc


def split_records(bytes content, bint has_kinds, int64_t record_bytes_max):
    """Find the complete records at the beginning of a buffer; see `records.split_records`."""
    cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(content)
    cdef int64_t end = len(content), at = 0, key, value, after, key_size, value_size, count = 0
    # A record takes 8 bytes or more.
    cdef int64_t room = end // 8 + 1
    cdef bytes ops = PyBytes_FromStringAndSize(NULL, room)
    cdef bytes table = PyBytes_FromStringAndSize(NULL, 32 * room)
    cdef uint8_t* op_at = <uint8_t*>PyBytes_AS_STRING(ops)
    cdef int64_t* row = <int64_t*>PyBytes_AS_STRING(table)
    cdef uint8_t op
    cdef int lead = 1 if has_kinds else 0
    cdef bint has_ended = False
    cdef object wrong = None
    while at < end:
        op = 0
        if has_kinds:
            op = data[at]
            if op == 0:
                at += 1
                has_ended = True
                break
            if op != PUT and op != DELETE and op != MERGE:
                wrong = f"a record has the unknown kind {op}"
                break
        if at + lead + 4 > end:
            break
        key_size = big(data + at + lead)
        if key_size == -1 and not has_kinds:
            at += 4
            has_ended = True
            break
        if key_size < 0 or key_size > record_bytes_max:
            wrong = f"a key has the size {key_size}"
            break
        key = at + lead + 4
        value = key + key_size + 4
        if value > end:
            break
        value_size = big(data + value - 4)
        if value_size < -1 or value_size > record_bytes_max or (has_kinds and (value_size == -1) != (op == DELETE)):
            wrong = f"a value has the size {value_size}"
            break
        after = value + (value_size if value_size > 0 else 0)
        if after > end:
            break
        if op == 0:
            op = DELETE if value_size == -1 else PUT
        op_at[count] = op
        row[0] = key
        row[1] = key_size
        row[2] = value
        row[3] = value_size
        row += 4
        count += 1
        at = after
    return ops[:count], table[: 32 * count], at, has_ended, wrong


def words(const uint8_t[:] content, const int64_t[:] starts, int64_t width):
    """Return `width` bytes at each position of a buffer, one after the other."""
    cdef int64_t count = starts.shape[0], end = content.shape[0] - width, row
    cdef bytes result = PyBytes_FromStringAndSize(NULL, width * count)
    cdef uint8_t* at = <uint8_t*>PyBytes_AS_STRING(result)
    if width < 1 or width > 16:
        raise ValueError("a word has 1 to 16 bytes")
    for row in range(count):
        if starts[row] < 0 or starts[row] > end:
            raise IndexError("a word is outside of its buffer")
        if width == 8:  # a constant size is copied faster
            memcpy(at, &content[starts[row]], 8)
        else:
            memcpy(at, &content[starts[row]], width)
        at += width
    return result


def gathered(const uint8_t[:] content, const int64_t[:] starts, const int64_t[:] sizes):
    """Return pieces of a buffer one after the other, and the offsets of the pieces, as i64."""
    cdef int64_t count = starts.shape[0], end = content.shape[0], row, total = 0
    if sizes.shape[0] != count:
        raise ValueError("as many sizes as starts are needed")
    for row in range(count):
        if starts[row] < 0 or sizes[row] < 0 or starts[row] > end - sizes[row]:
            raise IndexError("a piece is outside of its buffer")
        total += sizes[row]
    cdef bytes result = PyBytes_FromStringAndSize(NULL, total)
    cdef bytes offsets_result = PyBytes_FromStringAndSize(NULL, 8 * (count + 1))
    cdef uint8_t* at = <uint8_t*>PyBytes_AS_STRING(result)
    cdef int64_t* offsets = <int64_t*>PyBytes_AS_STRING(offsets_result)
    offsets[0] = 0
    for row in range(count):
        if sizes[row]:
            memcpy(at + offsets[row], &content[starts[row]], sizes[row])
        offsets[row + 1] = offsets[row] + sizes[row]
    return result, offsets_result


cdef struct Key:
    uint64_t hash
    int64_t start
    int64_t size


cdef class KeyNumbers:
    """The numbers of distinct keys, in the order in which they come; see `key_numbers.KeyNumbers`.

    An open-addressing table of numbers, the keys' hashes and places, and their bytes one after the other. The hash has a
    random seed, so that nobody can choose keys of one hash.
    """

    cdef uint64_t seed
    cdef int32_t* table
    cdef int64_t slots, count, keys_max, bytes_used, bytes_max
    cdef Key* keys
    cdef uint8_t* arena

    def __cinit__(self):
        self.seed = int.from_bytes(os.urandom(8), "little")
        self.slots, self.keys_max, self.bytes_max = 1 << 12, 1 << 11, 1 << 16
        self.table = <int32_t*>malloc(self.slots * sizeof(int32_t))
        self.keys = <Key*>malloc(self.keys_max * sizeof(Key))
        self.arena = <uint8_t*>malloc(self.bytes_max)
        if self.table == NULL or self.keys == NULL or self.arena == NULL:
            raise MemoryError
        self.clear_table()

    def __dealloc__(self):
        free(self.table)
        free(self.keys)
        free(self.arena)

    def __len__(self):
        return self.count

    cdef void clear_table(self) noexcept:
        cdef int64_t slot
        for slot in range(self.slots):
            self.table[slot] = -1

    cdef uint64_t hash_of(self, const uint8_t* at, int64_t size) noexcept:
        cdef uint64_t total = self.seed ^ <uint64_t>size, word
        while size >= 8:
            memcpy(&word, at, 8)
            total = (total ^ word) * 0x9E3779B97F4A7C15u
            total ^= total >> 29
            at += 8
            size -= 8
        word = 0
        memcpy(&word, at, size)
        total = (total ^ word) * 0xBF58476D1CE4E5B9u
        total = (total ^ (total >> 32)) * 0x94D049BB133111EBu
        return total ^ (total >> 31)

    cdef int64_t slot_of(self, uint64_t hash, const uint8_t* at, int64_t size) noexcept:
        """Return the slot that has a key's number, or that is free for it."""
        cdef int64_t slot = <int64_t>(hash & <uint64_t>(self.slots - 1))
        cdef Key* key
        while self.table[slot] >= 0:
            key = self.keys + self.table[slot]
            if key.hash == hash and key.size == size and memcmp(self.arena + key.start, at, size) == 0:
                break
            slot = (slot + 1) & (self.slots - 1)
        return slot

    cdef int reserve(self, int64_t size) except -1:
        """Make room for one more key."""
        cdef void* larger
        cdef int64_t number, slot, bytes_max
        if self.count == self.keys_max:
            if self.count > 1 << 30:
                raise OverflowError("more than 2^30 keys")
            larger = realloc(self.keys, 2 * self.keys_max * sizeof(Key))
            if larger == NULL:
                raise MemoryError
            self.keys, self.keys_max = <Key*>larger, 2 * self.keys_max
            larger = realloc(self.table, 2 * self.slots * sizeof(int32_t))
            if larger == NULL:
                raise MemoryError
            self.table, self.slots = <int32_t*>larger, 2 * self.slots
            self.clear_table()
            for number in range(self.count):
                slot = <int64_t>(self.keys[number].hash & <uint64_t>(self.slots - 1))
                while self.table[slot] >= 0:
                    slot = (slot + 1) & (self.slots - 1)
                self.table[slot] = <int32_t>number
        if self.bytes_used + size > self.bytes_max:
            bytes_max = 2 * self.bytes_max
            while self.bytes_used + size > bytes_max:
                bytes_max *= 2
            larger = realloc(self.arena, bytes_max)
            if larger == NULL:
                raise MemoryError
            self.arena, self.bytes_max = <uint8_t*>larger, bytes_max
        return 0

    def added(self, bytes content, const int64_t[:] starts, const int64_t[:] sizes):
        """Return the number of each key, as i64; a new key gets the next number."""
        return self.numbers(content, starts, sizes, True)

    def found(self, bytes content, const int64_t[:] starts, const int64_t[:] sizes):
        """Return the number of each key, as i64; -1 for an unknown key."""
        return self.numbers(content, starts, sizes, False)

    cdef bytes numbers(self, bytes content, const int64_t[:] starts, const int64_t[:] sizes, bint adds):
        cdef const uint8_t* data = <const uint8_t*>PyBytes_AS_STRING(content)
        cdef int64_t count = starts.shape[0], end = len(content), record, start, size, slot
        cdef uint64_t hash
        cdef bytes result = PyBytes_FromStringAndSize(NULL, 8 * count)
        cdef int64_t* numbers = <int64_t*>PyBytes_AS_STRING(result)
        if sizes.shape[0] != count:
            raise ValueError("as many sizes as starts are needed")
        for record in range(count):
            start, size = starts[record], sizes[record]
            if start < 0 or size < 0 or start > end - size:
                raise ValueError("a key is outside of its buffer")
            hash = self.hash_of(data + start, size)
            slot = self.slot_of(hash, data + start, size)
            if self.table[slot] < 0 and adds:
                if self.count == self.keys_max or self.bytes_used + size > self.bytes_max:
                    self.reserve(size)
                    slot = self.slot_of(hash, data + start, size)
                memcpy(self.arena + self.bytes_used, data + start, size)
                self.keys[self.count].hash = hash
                self.keys[self.count].start = self.bytes_used
                self.keys[self.count].size = size
                self.bytes_used += size
                self.table[slot] = <int32_t>self.count
                self.count += 1
            numbers[record] = self.table[slot]
        return result
