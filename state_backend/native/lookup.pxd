"""The declarations of `lookup` for other compiled modules."""

from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef enum Outcome:
    MISSING = 0
    FOUND = 1
    DAMAGED = -1  # a page or record is wrong; the caller looks up with py-lmdb

cdef enum:
    IN_STEP_MAX = 128  # names that one walk takes

cdef enum:  # where the parts of a record begin: see `state_backend.lmdb.record_format`
    EXPIRY_AT = 4
    STATE_AT = 12
    FORM_AT = 14
    HEADER_BYTES = 15

cdef struct Tree:
    uint64_t root
    uint32_t depth  # 0: the table is empty
    uint64_t upper  # no name begins with more; 0: unknown
    uint64_t leaves

cdef struct Lookup:
    # The name to find: up to sixteen bytes, big endian, padded with zeros, and its length.
    uint64_t high
    uint64_t low
    uint32_t bytes_
    # The state of the walk: a page, the range of nodes that may match, and the names around the range, in two halves.
    const uint8_t* page
    uint32_t first
    uint32_t last
    uint64_t lower
    uint64_t lower_low
    uint64_t upper
    uint64_t upper_low
    uint32_t split  # the node to compare next
    uint32_t guesses  # remaining in this page
    # What was found.
    const uint8_t* record
    size_t size
    int outcome

cdef struct CachedRecord:  # a record of `blocks` that was looked up before
    uint64_t high  # its name, of sixteen bytes
    uint64_t low
    const uint8_t* record  # NULL: none
    size_t size  # without its checksum
    int64_t checked_ms  # the clock reading at which the checksum was compared

cdef enum:
    CHECKED_MAX = 4096  # a power of two

cdef struct CheckedRecord:  # a record that equaled its checksum
    const uint8_t* record
    int64_t checked_ms

cdef struct Leaf:
    uint64_t first  # no name on the page begins with less
    uint64_t page

cdef struct Directory:  # the leaves of a tree in one version, in the order of their names
    Leaf* leaves
    uint32_t* starts  # for each value of a name's first bits: the first leaf that begins with that value or a greater one
    size_t count, room
    int bits
    bint is_built  # also after a failed attempt; then the count is 0
    uint64_t lookups  # in this version

cdef struct Map:
    const uint8_t* base
    size_t page_bytes
    uint64_t pages

cdef enum:
    DEPTH_MAX = 32  # of a tree

cdef struct Level:
    const uint8_t* page
    uint32_t at
    uint32_t nodes

cdef struct Walk:  # along the rows of a tree
    Level levels[DEPTH_MAX]
    Lookup lookup  # of the current page, and the current row

cdef class Pages:
    cdef Map map
    cdef uint64_t mapped_pages
    cdef int file
    cdef Tree keys
    cdef Tree fields
    cdef Tree blocks
    cdef Directory directory  # of `keys`
    cdef CachedRecord* cache  # CACHED_MAX records, each at the hash of its name; NULL until the first one
    cdef CheckedRecord checked[CHECKED_MAX]  # of this version, each at the hash of its address
    cdef int64_t moment_ms  # a reading of a monotonic clock; 0: each record is compared with its checksum
    cdef object main
    cdef uint64_t version  # the number of the transaction that wrote what `learn` read
    cdef public bint is_readable
    cdef bint find_base(self, const uint8_t* record) except -1
    cdef bint is_store(self) noexcept
    cdef bint is_at(self, const uint8_t* page, uint64_t number) except -1
    cdef void count_pages(self) noexcept
    cdef bint is_newest(self) noexcept
    cdef bint learn_tree(self, Tree* tree, bytes record) except -1
    cdef void find(self, const Tree* tree, Lookup** lookups, size_t count) noexcept nogil
    cdef int check_long(self, Lookup* lookup) noexcept nogil
    cdef bint has_directory(self, size_t lookups) noexcept nogil
    cdef bint build_directory(self) noexcept nogil
    cdef void walk(self, const Tree* tree, Lookup** lookups, size_t count) noexcept nogil
    cdef void walk_sorted(self, const Tree* tree, Lookup** lookups, size_t count) noexcept nogil
    cdef int first_row(self, const Tree* tree, Walk* walk, uint64_t high, uint64_t low, bint is_floor) noexcept nogil
    cdef int next_row(self, const Tree* tree, Walk* walk) noexcept nogil
    cdef int read_row(self, const Tree* tree, Walk* walk) noexcept nogil
    cdef int find_block(self, Lookup* lookup, int64_t moment_ms) noexcept nogil

cdef uint16_t slot_of(const uint8_t* key, size_t size) noexcept nogil
cdef uint16_t crc16_of(const uint8_t* text, size_t size) noexcept nogil
cdef uint32_t crc32_of(const uint8_t* text, size_t size) noexcept nogil
