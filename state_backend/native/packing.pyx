# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Makes a store's names and records of the plain values in sorted runs of changes (see `state_backend.model.records`).

A row is plain if all it does is to put a value that never expires, of a value state, at a key where nothing stands or such a
value of the same state. `Packing.take` makes of these, in the order of their positions, what py-lmdb's `putmulti` takes; it
writes nothing. All other rows are *left*: for them, and for the rows behind them at one position, the general path looks
at what stands there.

    name      position (6), big endian
    record    name bytes u32 | expire_at_ms i64: 0 | state number u16 | form u8: 0 | key | value | CRC-32 u32

What stands at a name is looked up in LMDB's pages, `LANES` names in step (see `lookup`), as the last commit left them; or,
without pages, asked of a function that sees what the transaction wrote.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy

from state_backend.native.lookup cimport FOUND, MISSING, IN_STEP_MAX, Lookup, Pages, crc32_of

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
    # So many rows ahead their numbers are asked of memory, and then their texts.
    NUMBERS_AHEAD = 24
    TEXTS_AHEAD = 12
    PUT = 1  # see `state_backend.model.records.Op`
    VALUE = 0  # see `state_backend.lmdb.layout`
    HEADER_BYTES = 15
    NAME_BYTES = 6
    CHECK_BYTES = 4
    # Rows of which the run is noted once: a power of two.
    BLOCK_BITS = 10

cdef struct Texts:
    const int32_t* ends
    const uint8_t* content
    int64_t bytes_

cdef struct Bits:
    const uint8_t* bits  # NULL: all are set
    int64_t first

cdef struct Run:
    int64_t first  # its first row, counted over all runs
    int64_t rows
    const uint64_t* positions
    const int16_t* states
    const int32_t* numbers  # of its states; -1: its rows are left
    int32_t states_count
    const uint8_t* ops
    Texts keys
    Texts values
    Bits has_value
    Bits expires
    bint never_expires
    uint8_t* left

cdef struct PlainRow:
    const Run* run
    int64_t row
    uint64_t position
    uint32_t number
    const uint8_t* key
    const uint8_t* value
    size_t key_bytes
    size_t value_bytes


cdef inline bint is_set(const Bits* bits, int64_t row) noexcept nogil:
    cdef int64_t at = bits.first + row
    return bits.bits == NULL or bits.bits[at >> 3] >> (at & 7) & 1


cdef inline bint text_at(const Texts* texts, int64_t row, const uint8_t** text, size_t* size) noexcept nogil:
    """Find a row's text; False if it does not lie within the column."""
    cdef int64_t start = texts.ends[row], end = texts.ends[row + 1]
    if start < 0 or end < start or end > texts.bytes_:
        return False
    text[0] = texts.content + start
    size[0] = end - start
    return True


cdef inline bint is_same_key(const PlainRow* one, const PlainRow* other) noexcept nogil:
    """Tell whether two rows put values of one state at one key."""
    return (
        one.number == other.number
        and one.key_bytes == other.key_bytes
        and memcmp(one.key, other.key, one.key_bytes) == 0
    )


cdef const uint8_t* data_of(object buffer, int64_t bytes_min) except? NULL:
    """Return where a buffer of Arrow begins; ValueError for one that is too short."""
    if buffer is None or buffer.size < bytes_min:
        raise ValueError("a run of changes has a column that is shorter than its rows")
    return <const uint8_t*><size_t>buffer.address


cdef class Packing:
    """The rows of some runs, to be taken in the order of their positions.

    order: the rows, counted over all runs, sorted by position; those of one position in their order. numbers: for each run the
    number of each of its states, -1 for those whose rows are left. pages: those of the version that the transaction began
    with, as long as nothing was written at these positions since; None: `get` looks up. Longer values are left. keeps_each: of
    several rows of a key all but the first are left.

    left: for each run a byte for each row, 1 if it is left. new: by state number, the names of what was taken last and where
    nothing stood.
    """

    cdef Run* runs
    cdef size_t runs_count
    cdef uint16_t* blocks
    cdef object held
    cdef const int64_t[::1] order
    cdef int64_t at
    cdef uint64_t position
    cdef Pages pages
    cdef object get
    cdef size_t value_bytes_max
    cdef bint keeps_each
    cdef bint may_replace  # the last row that was gathered: no row of its position is left
    cdef readonly list left
    cdef readonly dict new

    def __cinit__(
        self, list runs, const int64_t[::1] order, list numbers, Pages pages, get, size_t value_bytes_max, bint keeps_each
    ):
        cdef Run* run
        cdef int64_t rows = 0, block
        cdef size_t number
        self.runs_count = len(runs)
        self.runs = <Run*>calloc(max(1, self.runs_count), sizeof(Run))
        if self.runs == NULL:
            raise MemoryError
        self.held, self.left, self.new = [], [], {}
        for number in range(self.runs_count):
            run = &self.runs[number]
            run.first = rows
            self.take_in(run, runs[number], numbers[number])
            rows += run.rows
        if rows != order.shape[0] or self.runs_count > 65535:
            raise ValueError("as many rows have an order as there are, of at most 65,535 runs")
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
        self.keeps_each, self.may_replace = keeps_each, False

    def __dealloc__(self):
        free(self.runs)
        free(self.blocks)

    cdef int take_in(self, Run* run, object batch, object numbers) except -1:
        """Learn where the columns of a run lie."""
        cdef uint8_t[::1] left
        cdef const int32_t[::1] of_states = numbers
        cdef int64_t rows = batch.num_rows
        position, state, op, key, value, expiry = map(
            batch.column, ("position", "state", "op", "key", "value", "expire_at_ms")
        )
        indices = state.indices
        run.rows = rows
        run.positions = <const uint64_t*>data_of(position.buffers()[1], 8 * (position.offset + rows)) + <int64_t>position.offset
        run.states = <const int16_t*>data_of(indices.buffers()[1], 2 * (indices.offset + rows)) + <int64_t>indices.offset
        run.ops = data_of(op.buffers()[1], op.offset + rows) + <int64_t>op.offset
        run.numbers, run.states_count = &of_states[0], of_states.shape[0]
        self.take_texts(&run.keys, key)
        self.take_texts(&run.values, value)
        self.take_bits(&run.has_value, value)
        self.take_bits(&run.expires, expiry)
        run.never_expires = expiry.null_count == rows
        made = bytearray(rows)
        left = made
        run.left = &left[0] if rows else NULL
        self.left.append(made)
        self.held.append((batch, numbers, left))
        return 0

    cdef int take_texts(self, Texts* texts, object column) except -1:
        _, ends, content = column.buffers()
        texts.ends = <const int32_t*>data_of(ends, 4 * (column.offset + len(column) + 1)) + <int64_t>column.offset
        texts.content = data_of(content, 0) if content is not None else <const uint8_t*>b""
        texts.bytes_ = content.size if content is not None else 0
        return 0

    cdef int take_bits(self, Bits* bits, object column) except -1:
        valid = column.buffers()[0]
        bits.first = column.offset
        bits.bits = NULL if valid is None else data_of(valid, (column.offset + len(column) + 7) >> 3)
        return 0

    cdef inline Run* run_of(self, int64_t row) noexcept nogil:
        cdef Run* run = &self.runs[self.blocks[row >> BLOCK_BITS]]
        while row >= run.first + run.rows:
            run += 1
        return run

    cdef inline void ask_ahead(self, int64_t at) noexcept nogil:
        """Have memory bring what will be read soon: rows of many runs come in turn_scheduler, which no processor foresees."""
        cdef const Run* run
        cdef int64_t row
        if at + NUMBERS_AHEAD < self.order.shape[0]:
            row = self.order[at + NUMBERS_AHEAD]
            run = self.run_of(row)
            row -= run.first
            prefetch(run.positions + row)
            prefetch(run.keys.ends + row)
            prefetch(run.values.ends + row)
        if at + TEXTS_AHEAD < self.order.shape[0]:
            row = self.order[at + TEXTS_AHEAD]
            run = self.run_of(row)
            row -= run.first
            prefetch(run.keys.content + run.keys.ends[row])
            prefetch(run.values.content + run.values.ends[row])

    cdef bint fill(self, PlainRow* lane, Run* run, int64_t row) noexcept nogil:
        """Learn what a row puts; False if it is left."""
        cdef int16_t state = run.states[row]
        if run.ops[row] != PUT or state < 0 or state >= run.states_count or run.numbers[state] < 0:
            return False
        if not is_set(&run.has_value, row) or not (run.never_expires or not is_set(&run.expires, row)):
            return False
        lane.run, lane.row, lane.number = run, row, <uint32_t>run.numbers[state]
        return (
            text_at(&run.keys, row, &lane.key, &lane.key_bytes)
            and text_at(&run.values, row, &lane.value, &lane.value_bytes)
            and lane.value_bytes <= self.value_bytes_max
        )

    cdef size_t gather(self, PlainRow* lanes, int64_t most) noexcept nogil:
        """Find the next plain rows, one for a position; mark the others as left. Returns how many; 0 at the end.

        Of rows of one key that follow each other the last one counts, the others are done with it.
        """
        cdef size_t count = 0
        cdef int64_t row
        cdef uint64_t position
        cdef Run* run
        cdef PlainRow next_one
        while self.at < self.order.shape[0]:
            row = self.order[self.at]
            run = self.run_of(row)
            row -= run.first
            position = run.positions[row]
            if position != self.position and count == <size_t>most:
                break
            self.ask_ahead(self.at)
            self.at += 1
            if position != self.position:
                self.may_replace = self.fill(&lanes[count], run, row)
                if self.may_replace:
                    lanes[count].position = position
                    count += 1
                else:
                    run.left[row] = 1
                self.may_replace = self.may_replace and not self.keeps_each
            elif self.may_replace and count and self.fill(&next_one, run, row) and is_same_key(&next_one, &lanes[count - 1]):
                next_one.position = position
                lanes[count - 1] = next_one
            else:
                run.left[row] = 1
                self.may_replace = False
            self.position = position
        return count

    def take(self, int64_t rows_max):
        """Return (name, record) of about the next `rows_max` plain rows that change something; None at the end.

        There may be none among them.
        """
        cdef PlainRow lanes[LANES]
        cdef Lookup lookups[LANES]
        cdef Lookup* each[LANES]
        cdef size_t count, i
        cdef int64_t taken = 0
        cdef bint is_empty = self.pages is not None and self.pages.keys.depth == 0
        cdef list items = []
        self.new = {}
        for i in range(LANES):
            each[i] = &lookups[i]
        while taken < rows_max:
            with nogil:
                count = self.gather(lanes, LANES)
                for i in range(count):
                    lookups[i].high, lookups[i].low, lookups[i].bytes_ = lanes[i].position << 16, 0, NAME_BYTES
                    lookups[i].outcome = MISSING
                if self.pages is not None and not is_empty:
                    self.pages.walk_sorted(&self.pages.keys, each, count)
            if count == 0:
                break
            for i in range(count):
                self.pack(&lanes[i], &lookups[i], items)
            taken += count
        return items if taken else None

    cdef int pack(self, PlainRow* lane, const Lookup* found, list items) except -1:
        """Make a row's name and record, unless the same stands there; mark the row as left if something else does."""
        cdef uint64_t name_text = swap64(lane.position << 16)
        cdef size_t start = HEADER_BYTES + lane.key_bytes, size = start + lane.value_bytes + CHECK_BYTES
        cdef const uint8_t* old = NULL
        cdef size_t old_bytes = 0
        cdef bytes name = PyBytes_FromStringAndSize(<const char*>&name_text, NAME_BYTES)
        cdef bytes record = PyBytes_FromStringAndSize(NULL, size)
        cdef uint8_t* text = <uint8_t*>PyBytes_AS_STRING(record)
        cdef uint32_t key_bytes = lane.key_bytes, check
        cdef uint16_t number = lane.number
        cdef object stored = None
        memcpy(text, &key_bytes, 4)
        memcpy(text + 4, b"\0\0\0\0\0\0\0\0", 8)
        memcpy(text + 12, &number, 2)
        text[14] = VALUE
        memcpy(text + HEADER_BYTES, lane.key, lane.key_bytes)
        memcpy(text + start, lane.value, lane.value_bytes)
        check = crc32_of(text, size - CHECK_BYTES)
        memcpy(text + size - CHECK_BYTES, &check, CHECK_BYTES)
        if self.pages is None:
            stored = self.get(name)
            if stored is not None:
                old, old_bytes = <const uint8_t*><bytes>stored, len(<bytes>stored)
        elif found.outcome == FOUND:
            old, old_bytes = found.record, found.size
        elif found.outcome != MISSING:
            lane.run.left[lane.row] = 1
            return 0
        if old == NULL:
            new = self.new.get(number)
            if new is None:
                new = self.new[number] = []
            (<list>new).append(name)
        elif old_bytes < start or memcmp(old, text, start) != 0:
            lane.run.left[lane.row] = 1
            return 0
        elif old_bytes == size and memcmp(old, text, size) == 0:
            return 0
        items.append((name, record))
        return 0
