# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Packs the plain rows of sorted runs of changes (see `state_backend.model.records`) as names and records of a store.

A row is plain if it puts a value or a full small map that never expires, and the key has no record, or one of the same form
and state. A `Packing` yields (name, record) of plain rows in the order of their positions, for py-lmdb's `putmulti`. It
writes nothing. It skips all other rows, and the rows after them at the same position: the general path writes those.

    name      position (6), big endian
    record    name bytes u32 | expire_at_ms i64: 0 | state number u16 | form u8 | key | value or packed map | CRC-32 u32

The old record of a name is looked up in LMDB's pages as of the last commit, for `LANES` names in step (see `lookup`).
Without pages, a function looks it up; the function sees what the transaction has written.

No row becomes a Python object. Each yielded pair is the same tuple of the same two buffers; their content is valid until the
next pair is yielded.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc
from libc.string cimport memcmp, memcpy

from state_backend.native.lookup cimport (
    EXPIRY_AT, FOUND, HEADER_BYTES, IN_STEP_MAX, MISSING, STATE_AT, Lookup, Pages, crc32_of
)

cdef extern from *:
    """
    #include <stdint.h>
    #define swap64(x) __builtin_bswap64(x)
    #define prefetch(p) __builtin_prefetch((const void*)(p))
    """
    uint64_t swap64(uint64_t) noexcept nogil
    void prefetch(const void*) noexcept nogil

cdef enum:
    LANES = IN_STEP_MAX
    # Rows ahead of the current one: positions and offsets are prefetched first, then keys and values.
    OFFSETS_AHEAD = 24
    BYTES_AHEAD = 12
    PUT = 1  # see `state_backend.model.records.Op`
    SMALL_MAP = 1  # see `state_backend.lmdb.record_format`
    NAME_BYTES = 6
    CHECK_BYTES = 4
    SLOT_SHIFT = 32  # of a position
    # About so many bytes of records are made together; the last record may exceed this.
    RECORDS_BYTES = 1 << 16
    # An index has the run of the first row of each block of 2^BLOCK_BITS rows.
    BLOCK_BITS = 10

cdef struct BinaryColumn:  # of Arrow
    const int32_t* offsets
    const uint8_t* content
    int64_t bytes_

cdef struct Validity:  # Arrow's bitmap of rows that are not null
    const uint8_t* bits  # NULL: no row is null
    int64_t first

cdef struct Run:
    int64_t first  # its first row, counted over all runs
    int64_t rows
    const uint64_t* positions
    const int16_t* states
    const int32_t* tags  # of its states: number u16 | form u8, as in a record; -1: its rows are skipped
    int32_t states_count
    const uint8_t* ops
    BinaryColumn keys
    BinaryColumn values
    Validity has_field
    Validity has_value
    Validity expires
    bint never_expires
    uint8_t* skipped

cdef struct PlainRow:
    const Run* run
    int64_t row
    uint64_t position
    uint32_t tag
    const uint8_t* key
    const uint8_t* value
    size_t key_bytes
    size_t value_bytes
    uint8_t* record
    size_t size  # of the record


cdef inline bint is_set(const Validity* validity, int64_t row) noexcept nogil:
    cdef int64_t at = validity.first + row
    return validity.bits == NULL or validity.bits[at >> 3] >> (at & 7) & 1


cdef inline bint value_at(const BinaryColumn* column, int64_t row, const uint8_t** value, size_t* size) noexcept nogil:
    """Find a row's value; False if it is not within the column."""
    cdef int64_t start = column.offsets[row], end = column.offsets[row + 1]
    if start < 0 or end < start or end > column.bytes_:
        return False
    value[0] = column.content + start
    size[0] = end - start
    return True


cdef inline bint is_same_key(const PlainRow* one, const PlainRow* other) noexcept nogil:
    """Return whether two rows put values of one state at one key."""
    return (
        one.tag == other.tag
        and one.key_bytes == other.key_bytes
        and memcmp(one.key, other.key, one.key_bytes) == 0
    )


cdef const uint8_t* data_of(object buffer, int64_t bytes_min) except? NULL:
    """Return the address of an Arrow buffer; ValueError if it is too short."""
    if buffer is None or buffer.size < bytes_min:
        raise ValueError("a run of changes has a column that is shorter than its rows")
    return <const uint8_t*><size_t>buffer.address


cdef class BorrowedBuffer:
    """A read-only buffer over memory of a `Packing`, which changes and frees it."""

    cdef const uint8_t* content
    cdef size_t size

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void*>self.content, <Py_ssize_t>self.size, 1, flags)


cdef class Packing:
    """Iterates over the plain rows of some runs in the order of their positions, in batches.

    Args:
        order: The numbers of the rows, counted over all runs, sorted by position; rows of one position keep their order.
        tags: For each run the tags of its states, number | form << 16; -1 for a state whose rows are skipped.
        pages: Of the version that the transaction began with, if it has written nothing at these positions; None: `get`
            looks records up.
        value_bytes_max, map_bytes_max, map_fields_max: Longer values, and larger maps, are skipped.
        takes_whole_keys: All rows of a position are skipped, unless they are plain rows of one key in one run.

    Attributes of all batches:
        skipped: For each run a byte for each row, 1 if the row is skipped.

    Attributes of the current batch:
        changed: How many pairs were yielded.
        new: How many of these pairs have a new key, by (slot, state number).
        keys: The keys of the first `keys_max` pairs.
        are_new: For each of `keys`, whether it is new.
    """

    cdef Run* runs
    cdef size_t runs_count
    cdef uint16_t* blocks
    cdef list owners  # of the memory that `runs` points to
    cdef const int64_t[::1] order
    cdef int64_t at
    cdef uint64_t position
    cdef Pages pages
    cdef object get
    cdef size_t value_bytes_max
    cdef size_t map_bytes_max
    cdef uint32_t map_fields_max
    cdef bint takes_whole_keys
    cdef bint may_replace  # whether a row may replace the last gathered one: no row of its position is skipped
    cdef PlainRow* lanes
    cdef Lookup* lookups
    cdef size_t lane, lanes_count  # the next lane, and how many were looked up
    cdef int64_t rows_left  # in the batch
    cdef int64_t keys_max
    cdef uint64_t name
    cdef uint8_t* records  # of the lanes
    cdef size_t records_room
    cdef BorrowedBuffer name_buffer, record_buffer
    cdef tuple pair
    cdef int64_t new_slot, new_count  # counted, but not in `new` yet
    cdef uint32_t new_tag
    cdef readonly list skipped
    cdef readonly int64_t changed
    cdef readonly dict new
    cdef readonly list keys
    cdef readonly list are_new

    def __cinit__(
        self,
        list runs,
        const int64_t[::1] order,
        list tags,
        Pages pages,
        get,
        size_t value_bytes_max,
        size_t map_bytes_max,
        uint32_t map_fields_max,
        bint takes_whole_keys,
    ):
        cdef Run* run
        cdef int64_t rows = 0, block
        cdef size_t number
        self.runs_count = len(runs)
        self.runs = <Run*>calloc(max(1, self.runs_count), sizeof(Run))
        self.lanes = <PlainRow*>calloc(LANES, sizeof(PlainRow))
        self.lookups = <Lookup*>calloc(LANES, sizeof(Lookup))
        if self.runs == NULL or self.lanes == NULL or self.lookups == NULL:
            raise MemoryError
        self.owners, self.skipped = [], []
        for number in range(self.runs_count):
            run = &self.runs[number]
            run.first = rows
            self.read_columns(run, runs[number], tags[number])
            rows += run.rows
        if rows != order.shape[0] or self.runs_count > 65535:
            raise ValueError("`order` must have a number for each row, and there may be at most 65,535 runs")
        self.blocks = <uint16_t*>calloc((rows >> BLOCK_BITS) + 1, sizeof(uint16_t))
        if self.blocks == NULL:
            raise MemoryError
        number = 0
        for block in range((rows >> BLOCK_BITS) + 1):
            while number + 1 < self.runs_count and self.runs[number + 1].first <= block << BLOCK_BITS:
                number += 1
            self.blocks[block] = <uint16_t>number
        self.order, self.at, self.position = order, 0, ~(<uint64_t>0)
        self.pages, self.get, self.value_bytes_max = pages, get, value_bytes_max
        self.map_bytes_max, self.map_fields_max = map_bytes_max, map_fields_max
        self.takes_whole_keys, self.may_replace = takes_whole_keys, False
        self.name_buffer, self.record_buffer = BorrowedBuffer(), BorrowedBuffer()
        self.name_buffer.content, self.name_buffer.size = <const uint8_t*>&self.name, NAME_BYTES
        self.pair = (self.name_buffer, self.record_buffer)
        self.changed, self.new, self.keys, self.are_new = 0, {}, [], []

    def __dealloc__(self):
        free(self.runs)
        free(self.blocks)
        free(self.lanes)
        free(self.lookups)
        free(self.records)

    cdef int read_columns(self, Run* run, object batch, object tags) except -1:
        """Read the addresses of the columns of a run."""
        cdef uint8_t[::1] skipped
        cdef const int32_t[::1] of_states = tags
        cdef int64_t rows = batch.num_rows
        position, state, op, key, field, value, expiry = map(
            batch.column, ("position", "state", "op", "key", "field", "value", "expire_at_ms")
        )
        indices = state.indices
        run.rows = rows
        run.positions = <const uint64_t*>data_of(position.buffers()[1], 8 * (position.offset + rows)) + <int64_t>position.offset
        run.states = <const int16_t*>data_of(indices.buffers()[1], 2 * (indices.offset + rows)) + <int64_t>indices.offset
        run.ops = data_of(op.buffers()[1], op.offset + rows) + <int64_t>op.offset
        run.tags, run.states_count = &of_states[0], of_states.shape[0]
        self.read_binary(&run.keys, key)
        self.read_binary(&run.values, value)
        self.read_validity(&run.has_field, field)
        self.read_validity(&run.has_value, value)
        self.read_validity(&run.expires, expiry)
        run.never_expires = expiry.null_count == rows
        marks = bytearray(rows)
        skipped = marks
        run.skipped = &skipped[0] if rows else NULL
        self.skipped.append(marks)
        self.owners.append((batch, tags, skipped))
        return 0

    cdef int read_binary(self, BinaryColumn* binary, object column) except -1:
        _, offsets, content = column.buffers()
        binary.offsets = <const int32_t*>data_of(offsets, 4 * (column.offset + len(column) + 1)) + <int64_t>column.offset
        binary.content = data_of(content, 0) if content is not None else <const uint8_t*>b""
        binary.bytes_ = content.size if content is not None else 0
        return 0

    cdef int read_validity(self, Validity* validity, object column) except -1:
        bits = column.buffers()[0]
        validity.first = column.offset
        validity.bits = NULL if bits is None else data_of(bits, (column.offset + len(column) + 7) >> 3)
        return 0

    cdef inline Run* run_of(self, int64_t row) noexcept nogil:
        cdef Run* run = &self.runs[self.blocks[row >> BLOCK_BITS]]
        while row >= run.first + run.rows:
            run += 1
        return run

    cdef inline void prefetch_rows(self, int64_t at) noexcept nogil:
        """Prefetch the rows that come next: the processor cannot predict their order, as they are from many runs."""
        cdef const Run* run
        cdef int64_t row
        if at + OFFSETS_AHEAD < self.order.shape[0]:
            row = self.order[at + OFFSETS_AHEAD]
            run = self.run_of(row)
            row -= run.first
            prefetch(run.positions + row)
            prefetch(run.keys.offsets + row)
            prefetch(run.values.offsets + row)
        if at + BYTES_AHEAD < self.order.shape[0]:
            row = self.order[at + BYTES_AHEAD]
            run = self.run_of(row)
            row -= run.first
            prefetch(run.keys.content + run.keys.offsets[row])
            prefetch(run.values.content + run.values.offsets[row])

    cdef bint fill(self, PlainRow* lane, Run* run, int64_t row) noexcept nogil:
        """Fill a lane with a row's put; False if the row is not plain."""
        cdef int16_t state = run.states[row]
        if run.ops[row] != PUT or state < 0 or state >= run.states_count or run.tags[state] < 0:
            return False
        if not is_set(&run.has_value, row) or not (run.never_expires or not is_set(&run.expires, row)):
            return False
        lane.run, lane.row, lane.tag = run, row, <uint32_t>run.tags[state]
        if not value_at(&run.keys, row, &lane.key, &lane.key_bytes) or not value_at(
            &run.values, row, &lane.value, &lane.value_bytes
        ):
            return False
        if lane.tag >> 16 != SMALL_MAP:
            return lane.value_bytes <= self.value_bytes_max
        # A full map, not one field. A map without fields is a deletion.
        if is_set(&run.has_field, row) or not 2 <= lane.value_bytes <= self.map_bytes_max:
            return False
        return 1 <= (lane.value[0] | <uint32_t>lane.value[1] << 8) <= self.map_fields_max

    cdef size_t gather(self, PlainRow* lanes, int64_t most) noexcept nogil:
        """Find the next plain rows, one for each position, and mark the others as skipped. Return their number; 0: the end.

        Of consecutive plain rows of one key only the last is used: it replaces the rows before it. With
        `takes_whole_keys` these must be rows of one run, and a plain row is skipped if another row of its position is.
        """
        cdef size_t count = 0, size = 0
        cdef int64_t row
        cdef uint64_t position
        cdef Run* run
        cdef PlainRow next_one
        while self.at < self.order.shape[0]:
            row = self.order[self.at]
            run = self.run_of(row)
            row -= run.first
            position = run.positions[row]
            if position != self.position and (count == <size_t>most or size >= RECORDS_BYTES):
                break
            self.prefetch_rows(self.at)
            self.at += 1
            if position != self.position:
                self.may_replace = self.fill(&lanes[count], run, row)
                if self.may_replace:
                    lanes[count].position = position
                    size += lanes[count].key_bytes + lanes[count].value_bytes
                    count += 1
                else:
                    run.skipped[row] = 1
            elif (
                self.may_replace
                and count
                and (not self.takes_whole_keys or run == lanes[count - 1].run)
                and self.fill(&next_one, run, row)
                and is_same_key(&next_one, &lanes[count - 1])
            ):
                next_one.position = position
                lanes[count - 1] = next_one
                size += next_one.value_bytes
            else:
                run.skipped[row] = 1
                if self.may_replace and count and self.takes_whole_keys:
                    count -= 1
                    lanes[count].run.skipped[lanes[count].row] = 1
                self.may_replace = False
            self.position = position
        return count

    def begin(self, int64_t rows_max, int64_t keys_max):
        """Begin a batch of about `rows_max` plain rows, which iteration yields; False if no plain row remains."""
        self.rows_left, self.keys_max = rows_max, keys_max
        self.changed, self.new, self.keys, self.are_new = 0, {}, [], []
        self.new_count, self.lane, self.lanes_count = 0, 0, 0
        return self.look_up()

    def __iter__(self):
        return self

    def __next__(self):
        """Return (name, record) of the next plain row whose record differs from the old one."""
        while True:
            if self.lane == self.lanes_count and not self.look_up():
                self.count_new()
                raise StopIteration
            self.lane += 1
            if self.is_change(&self.lanes[self.lane - 1], &self.lookups[self.lane - 1]):
                return self.pair

    cdef bint look_up(self) except -1:
        """Gather plain rows, look up their old records, and make the new ones; False if no row remains."""
        cdef Lookup* each[LANES]
        cdef size_t i, count = 0
        cdef bint has_room = True
        if self.rows_left <= 0:
            return False
        with nogil:
            count = self.gather(self.lanes, LANES)
            for i in range(count):
                each[i] = &self.lookups[i]
                each[i].high, each[i].low, each[i].bytes_ = self.lanes[i].position << 16, 0, NAME_BYTES
                each[i].outcome = MISSING
            if count and self.pages is not None and self.pages.keys.depth:
                self.pages.walk_sorted(&self.pages.keys, each, count)
            has_room = self.pack(self.lanes, count)
        if not has_room:
            raise MemoryError
        self.rows_left -= count
        self.lane, self.lanes_count = 0, count
        return count > 0

    cdef bint pack(self, PlainRow* lanes, size_t count) noexcept nogil:
        """Make the records of some lanes; False if there is no memory for them."""
        cdef size_t i, needed = 0
        cdef PlainRow* lane
        cdef uint8_t* record
        cdef uint32_t key_bytes, check
        for i in range(count):
            lanes[i].size = HEADER_BYTES + lanes[i].key_bytes + lanes[i].value_bytes + CHECK_BYTES
            needed += lanes[i].size
        if needed > self.records_room:
            free(self.records)
            self.records, self.records_room = <uint8_t*>malloc(2 * needed), 0
            if self.records == NULL:
                return False
            self.records_room = 2 * needed
        record = self.records
        for i in range(count):
            lane = &lanes[i]
            lane.record = record
            key_bytes = lane.key_bytes
            memcpy(record, &key_bytes, 4)
            memcpy(record + EXPIRY_AT, b"\0\0\0\0\0\0\0\0", 8)
            memcpy(record + STATE_AT, &lane.tag, 3)
            memcpy(record + HEADER_BYTES, lane.key, lane.key_bytes)
            memcpy(record + HEADER_BYTES + lane.key_bytes, lane.value, lane.value_bytes)
            record += lane.size
        # In a separate loop: a read that spans several recent writes makes the processor wait.
        for i in range(count):
            lane = &lanes[i]
            check = crc32_of(lane.record, lane.size - CHECK_BYTES)
            memcpy(lane.record + lane.size - CHECK_BYTES, &check, CHECK_BYTES)
        return True

    cdef bint is_change(self, PlainRow* lane, const Lookup* found) except -1:
        """Set the pair to a row's name and record; False if the old record is the same, or if the row is skipped."""
        cdef size_t start = HEADER_BYTES + lane.key_bytes
        cdef const uint8_t* old = NULL
        cdef size_t old_bytes = 0
        cdef object stored = None
        self.name = swap64(lane.position << 16)
        if self.pages is None:
            stored = self.get(PyBytes_FromStringAndSize(<const char*>&self.name, NAME_BYTES))
            if stored is not None:
                old, old_bytes = <const uint8_t*><bytes>stored, len(<bytes>stored)
        elif found.outcome == FOUND:
            old, old_bytes = found.record, found.size
        elif found.outcome != MISSING:
            lane.run.skipped[lane.row] = 1
            return False
        if old != NULL:
            if old_bytes < start or memcmp(old, lane.record, start) != 0:
                lane.run.skipped[lane.row] = 1
                return False
            if old_bytes == lane.size and memcmp(old + start, lane.record + start, lane.size - start) == 0:
                return False
        elif self.new_count and self.new_tag == lane.tag and self.new_slot == <int64_t>(lane.position >> SLOT_SHIFT):
            self.new_count += 1
        else:
            self.count_new()
            self.new_tag, self.new_slot, self.new_count = lane.tag, lane.position >> SLOT_SHIFT, 1
        if self.changed < self.keys_max:
            self.keys.append(PyBytes_FromStringAndSize(<const char*>lane.key, lane.key_bytes))
            self.are_new.append(old == NULL)
        self.changed += 1
        self.record_buffer.content, self.record_buffer.size = lane.record, lane.size
        return True

    cdef int count_new(self) except -1:
        if self.new_count:
            slot_and_state = (self.new_slot, self.new_tag & 0xFFFF)
            self.new[slot_and_state] = self.new.get(slot_and_state, 0) + self.new_count
            self.new_count = 0
        return 0
