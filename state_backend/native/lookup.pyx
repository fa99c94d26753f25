# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Looks names (LMDB's keys) up in the tables of an LMDB store, many at a time.

A look-up in a large store waits for memory at each level of LMDB's B+ tree. `Pages.find` walks down the tree with all
look-ups in step: while one waits for its cache line, the others continue. After many look-ups in one version the branch
pages are read once, into a directory of leaves; later walks begin at their leaves. `Pages.scan` walks along the leaves.

The walk reads LMDB's pages where LMDB maps them. It calls no LMDB function, and it never writes. The caller has an open
read transaction of py-lmdb: until it ends, LMDB does not reuse the pages of its version. `Pages.learn` reads the roots of
the tables in that version. Page numbers, offsets and sizes are checked before they are used. A page with a wrong one is
DAMAGED, and the caller looks up with py-lmdb.

    page      number u64 | pad u16 | flags u16 | lower u16 | upper u16 | node offsets u16...  | nodes
    branch    child's number: low u16, middle u16, high u16 (in `flags`) | name bytes u16 | name
    leaf      data bytes: low u16, high u16 | flags u16 | name bytes u16 | name | data, or the overflow page's number
    overflow  number u64 | pad u16 | flags u16 | pages u32 | data
    table     pad u32 | flags u16 | depth u16 | branch, leaf, overflow pages, entries u64 each | root u64
    meta      behind the page's 16 bytes: magic u32 | version u32 | address u64 | map bytes u64 | table: page bytes in pad
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.errno cimport EINVAL, errno
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memchr, memcmp, memset
from posix.stat cimport fstat, struct_stat
from libc.stdint cimport int64_t
from posix.types cimport off_t

from state_backend.native.folding cimport can_fold, fold
from state_backend.native.little_endian cimport u16, u32, u64

cdef extern from *:
    """
    #include <stdint.h>
    #if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
    #error "the native core is for little-endian machines; others run without it"
    #endif
    #define swap64(x) __builtin_bswap64(x)
    #define prefetch(p) __builtin_prefetch((const void*)(p))
    """
    uint64_t swap64(uint64_t) noexcept nogil
    void prefetch(const void*) noexcept nogil

cdef extern from "sys/mman.h" nogil:
    int madvise(void*, size_t, int)
    int MADV_WILLNEED

cdef extern from "unistd.h" nogil:
    ssize_t pread(int, void*, size_t, off_t)
    long sysconf(int)
    int _SC_PAGESIZE

cdef enum:
    POPULATE_READ = 22  # Linux' MADV_POPULATE_READ, which older headers lack
    POPULATE_STEP_BYTES = 32 << 20
    PAGE_HEADER = 16
    META_TRANSACTION_AT = 128  # in a meta page, after its header
    NODE_HEADER = 8
    BRANCH = 0x01
    LEAF = 0x02
    OVERFLOW = 0x04
    IN_OVERFLOW = 0x01  # a flag of a leaf's node
    TABLE_BYTES = 48
    CHECK_BYTES = 4  # see `state_backend.codec.checksums`
    NAME_BYTES_MAX = 16
    GUESSES_MAX = 4  # in one page, which has a few hundred nodes at most
    FOLDED_BYTES_MIN = 24  # for shorter texts the CRC tables are as fast (measured)
    KEYS_BITS = 62  # the first 64 bits of a name are a position, which is less than 2^46, and 16 more bits
    KEYS_UPPER = 1 << KEYS_BITS
    CACHE_LINE_BYTES = 64
    # A directory of up to LEAVES_MAX leaves is built when a version has had one look-up for every so many leaves. Building
    # takes 4 to 7 ns a leaf, and saves some 50 ns a look-up (measured with 100,000 and a million keys).
    LEAVES_PER_LOOKUP = 8
    LEAVES_MAX = 1 << 20
    DIRECTORY_BITS_MAX = 20
    # Forms of records, and a payload: see `state_backend.lmdb.record_format`.
    LARGE_MAP = 5
    LARGE_SORTED_SET = 9
    LARGE_MAP_BYTES = 32
    POSITION_BYTES = 6
    PLACE_BYTES = 8  # a position and an ordinal
    CACHE_SPREAD = 0x9E3779B1  # a prime; gives nodes that have the same number in different sets different hashes
    LONG_BYTES = 128  # of a record; to compare a shorter one with its checksum takes no longer than to find that it was
    CACHED_MAX = 1024  # a power of two; a sorted set of a million members has a tenth as many upper nodes
    MAGIC = 0xBEEFC0DE
    DATA_VERSION = 1

# -- hashes: those of `state_backend.model.slots` ----------------------------------------------------------------------

cdef uint16_t crc16_table[8][256]
cdef uint32_t crc32_table[8][256]


cdef void fill_tables() noexcept:
    cdef uint32_t i, j, crc
    for i in range(256):
        crc = i << 8
        for j in range(8):
            crc = ((crc << 1) ^ 0x1021) & 0xFFFF if crc & 0x8000 else (crc << 1) & 0xFFFF
        crc16_table[0][i] = <uint16_t>crc
        crc = i
        for j in range(8):
            crc = (crc >> 1) ^ 0xEDB88320U if crc & 1 else crc >> 1
        crc32_table[0][i] = crc
    for i in range(256):
        for j in range(1, 8):
            crc16_table[j][i] = <uint16_t>(crc16_table[j - 1][i] << 8) ^ crc16_table[0][crc16_table[j - 1][i] >> 8]
            crc32_table[j][i] = (crc32_table[j - 1][i] >> 8) ^ crc32_table[0][crc32_table[j - 1][i] & 255]


fill_tables()


cdef uint16_t crc16_of(const uint8_t* text, size_t size) noexcept nogil:
    cdef uint32_t crc = 0
    while size >= 8:
        crc = (
            crc16_table[7][(crc >> 8) ^ text[0]]
            ^ crc16_table[6][(crc & 255) ^ text[1]]
            ^ crc16_table[5][text[2]]
            ^ crc16_table[4][text[3]]
            ^ crc16_table[3][text[4]]
            ^ crc16_table[2][text[5]]
            ^ crc16_table[1][text[6]]
            ^ crc16_table[0][text[7]]
        )
        text += 8
        size -= 8
    while size:
        crc = ((crc << 8) & 0xFFFF) ^ crc16_table[0][(crc >> 8) ^ text[0]]
        text += 1
        size -= 1
    return <uint16_t>crc


cdef bint has_folding = can_fold()


cdef uint32_t crc32_of(const uint8_t* text, size_t size) noexcept nogil:
    cdef uint32_t crc = ~(<uint32_t>0), low, high
    if size >= FOLDED_BYTES_MIN and has_folding:
        return ~fold(crc, text, size)
    while size >= 8:
        low, high = u32(text) ^ crc, u32(text + 4)
        crc = (
            crc32_table[7][low & 255]
            ^ crc32_table[6][(low >> 8) & 255]
            ^ crc32_table[5][(low >> 16) & 255]
            ^ crc32_table[4][low >> 24]
            ^ crc32_table[3][high & 255]
            ^ crc32_table[2][(high >> 8) & 255]
            ^ crc32_table[1][(high >> 16) & 255]
            ^ crc32_table[0][high >> 24]
        )
        text += 8
        size -= 8
    while size:
        crc = (crc >> 8) ^ crc32_table[0][(crc ^ text[0]) & 255]
        text += 1
        size -= 1
    return ~crc


cdef uint16_t slot_of(const uint8_t* key, size_t size) noexcept nogil:
    """Return a key's slot: only the text between the first `{` and the first `}` after it counts, if there is any."""
    cdef const uint8_t* start = <const uint8_t*>memchr(key, 123, size) if size else NULL
    cdef const uint8_t* end
    if start != NULL:
        start += 1
        end = <const uint8_t*>memchr(start, 125, key + size - start) if start < key + size else NULL
        if end != NULL and end > start:
            key, size = start, end - start
    return crc16_of(key, size) & 16383


# -- the tree ----------------------------------------------------------------------------------------------------------


cdef inline const uint8_t* node_at(const uint8_t* page, uint32_t index, size_t page_bytes) noexcept nogil:
    """Return a node; NULL if its header or name is not within the page, or its name is longer than NAME_BYTES_MAX."""
    cdef uint32_t offset = u16(page + PAGE_HEADER + 2 * index)
    cdef uint32_t name_bytes
    if offset < PAGE_HEADER or offset + NODE_HEADER > page_bytes:
        return NULL
    name_bytes = u16(page + offset + 6)
    if name_bytes > NAME_BYTES_MAX or offset + NODE_HEADER + name_bytes > page_bytes:
        return NULL
    return page + offset


cdef inline uint64_t child_of(const uint8_t* node) noexcept nogil:
    """Return the number of the page that a branch's node leads to."""
    return u64(node) & 0xFFFFFFFFFFFFU


# A node's header has eight bytes. So the eight bytes before the end of a name never begin before its node, and reading them
# never leaves the page.


cdef inline uint64_t high_of(const uint8_t* node) noexcept nogil:
    """Return the first eight bytes of a node's name as a number, padded with zeros."""
    cdef uint32_t bytes_ = u16(node + 6)
    if bytes_ > 8:
        return swap64(u64(node + NODE_HEADER))
    return swap64(u64(node + bytes_)) << (8 * (8 - bytes_)) if bytes_ else 0


cdef inline uint64_t low_of(const uint8_t* node) noexcept nogil:
    """Return the second eight bytes of a node's name as a number, padded with zeros."""
    cdef uint32_t bytes_ = u16(node + 6)
    return swap64(u64(node + bytes_)) << (8 * (16 - bytes_)) if bytes_ > 8 else 0


cdef inline int compare(const uint8_t* node, const Lookup* lookup, uint64_t high, uint64_t low) noexcept nogil:
    """Compare a node's name, given as two halves, with the name to find: negative, zero or positive."""
    if high != lookup.high:
        return -1 if high < lookup.high else 1
    if low != lookup.low:
        return -1 if low < lookup.low else 1
    return <int>u16(node + 6) - <int>lookup.bytes_


cdef inline bint enter(const Map* map, Lookup* lookup, uint64_t number, bint is_leaf) noexcept nogil:
    """Move a look-up to a page of the tree; False if the page is damaged."""
    cdef const uint8_t* page
    cdef uint32_t lower
    if number >= map.pages:
        return False
    page = map.base + number * map.page_bytes
    lower = u16(page + 12)
    if u64(page) != number or lower <= PAGE_HEADER or lower > map.page_bytes or lower & 1:
        return False
    if (u16(page + 10) & (BRANCH | LEAF | OVERFLOW)) != (LEAF if is_leaf else BRANCH):
        return False
    lookup.page, lookup.first, lookup.last, lookup.guesses = page, 0, (lower - PAGE_HEADER) >> 1, GUESSES_MAX
    return True


cdef inline double share_of(uint64_t lower, uint64_t at, uint64_t upper) noexcept nogil:
    """Return the position of `at` between `lower` and `upper`, from 0 to 1."""
    return <double><int64_t>((at - lower) >> 1) / <double><int64_t>(((upper - lower) >> 1) + 1)


cdef inline uint32_t split_of(const Lookup* lookup) noexcept nogil:
    """Return the node to compare next, between the first and the last of a range of two or more.

    Names are hashes, or ids followed by hashes or by node numbers; all these are evenly distributed. So the index of a name
    is guessed from its distance to the names around the range (interpolation search). After GUESSES_MAX guesses the
    search is binary.
    """
    cdef uint32_t nodes = lookup.last - lookup.first
    cdef uint64_t lower = 0, upper = ~(<uint64_t>0)
    cdef double share
    if not lookup.guesses:
        return lookup.first + (nodes >> 1)
    if lookup.lower == lookup.high or lookup.upper == lookup.high:
        # A name at one end of the range has the same id. If the name at the other end has another id, the numbers of this
        # id begin, or end, within the range.
        if lookup.lower == lookup.high:
            lower = lookup.lower_low
        if lookup.upper == lookup.high:
            upper = lookup.upper_low
        if upper <= lower or lookup.low > upper:
            return lookup.first + (nodes >> 1)
        share = share_of(lower, lookup.low, upper)
    elif lookup.upper <= lookup.lower or lookup.high > lookup.upper:
        return lookup.first + (nodes >> 1)
    else:
        share = share_of(lookup.lower, lookup.high, lookup.upper)
    return lookup.first + min(max(<uint32_t>(share * nodes), 1), nodes - 1)


cdef inline void aim(const Map* map, Lookup* lookup) noexcept nogil:
    """Choose the node to compare next, if several remain, and prefetch it."""
    cdef uint32_t offset
    if lookup.last - lookup.first > 1:
        lookup.split = split_of(lookup)
        offset = u16(lookup.page + PAGE_HEADER + 2 * lookup.split)
        if offset < map.page_bytes:
            prefetch(lookup.page + offset)


cdef inline void prefetch_page(const Map* map, uint64_t number) noexcept nogil:
    """Prefetch a full page: a look-up before a write copies it soon."""
    cdef size_t at = 0
    while number < map.pages and at < map.page_bytes:
        prefetch(map.base + number * map.page_bytes + at)
        at += CACHE_LINE_BYTES


cdef inline int take(const Map* map, Lookup* lookup, const uint8_t* node) noexcept nogil:
    """Find a leaf node's data, in the page itself or in overflow pages; DAMAGED if it is not within them."""
    cdef uint64_t size = <uint64_t>u16(node) | <uint64_t>u16(node + 2) << 16
    cdef const uint8_t* data = node + NODE_HEADER + u16(node + 6)
    cdef const uint8_t* end = lookup.page + map.page_bytes
    cdef uint16_t flags = u16(node + 4)
    cdef uint64_t number
    cdef uint32_t pages
    if flags == IN_OVERFLOW:
        if data + 8 > end:
            return DAMAGED
        number = u64(data)
        if number >= map.pages:
            return DAMAGED
        data = map.base + number * map.page_bytes
        pages = u32(data + 12)
        if u64(data) != number or not u16(data + 10) & OVERFLOW or pages > map.pages - number:
            return DAMAGED
        if size + PAGE_HEADER > pages * map.page_bytes:
            return DAMAGED
        data += PAGE_HEADER
    elif flags or size > <uint64_t>(end - data):
        return DAMAGED
    lookup.record, lookup.size = data, size
    prefetch(data)
    prefetch(data + 64)
    return FOUND


cdef inline int check(Lookup* lookup) noexcept nogil:
    """Compare a record with the checksum at its end, and cut the checksum off."""
    if lookup.size < CHECK_BYTES:
        return DAMAGED
    lookup.size -= CHECK_BYTES
    return FOUND if crc32_of(lookup.record, lookup.size) == u32(lookup.record + lookup.size) else DAMAGED


cdef inline void begin(const Tree* tree, Lookup** lookups, size_t count) noexcept nogil:
    """Set look-ups to a tree's root."""
    cdef size_t i
    for i in range(count):
        lookups[i].outcome = FOUND if tree.depth else MISSING
        lookups[i].record = NULL
        lookups[i].size = tree.root
        lookups[i].lower = lookups[i].lower_low = lookups[i].upper_low = 0
        lookups[i].upper = tree.upper


cdef void search(const Map* map, Lookup** lookups, size_t count) noexcept nogil:
    """Find on the page of each look-up the last node whose name is not greater than the look-up's, or the first node.

    Works in step, after `aim`, for at most IN_STEP_MAX look-ups.
    """
    cdef Lookup* searching[IN_STEP_MAX]
    cdef size_t i, left = 0
    cdef uint64_t high, low
    cdef Lookup* lookup
    cdef const uint8_t* node
    for i in range(count):
        if lookups[i].outcome == FOUND and lookups[i].last - lookups[i].first > 1:
            searching[left] = lookups[i]
            left += 1
    while left:
        count, left = left, 0
        for i in range(count):
            lookup = searching[i]
            node = node_at(lookup.page, lookup.split, map.page_bytes)
            if node == NULL:
                lookup.outcome = DAMAGED
                continue
            high, low = high_of(node), low_of(node)
            if compare(node, lookup, high, low) <= 0:
                lookup.first, lookup.lower, lookup.lower_low = lookup.split, high, low
            else:
                lookup.last, lookup.upper, lookup.upper_low = lookup.split, high, low
            lookup.guesses -= lookup.guesses > 0
            if lookup.last - lookup.first > 1:
                searching[left] = lookup
                left += 1
                aim(map, lookup)


cdef inline void search_behind(const Map* map, const Lookup* before, Lookup* lookup, uint64_t upper) noexcept nogil:
    """Search for one name on the page where a lower name was found: most often it is at one of the next nodes."""
    cdef const uint8_t* node
    cdef uint64_t high, low
    cdef uint32_t step = 1
    lookup.outcome, lookup.page, lookup.guesses = FOUND, before.page, GUESSES_MAX
    lookup.first, lookup.lower, lookup.lower_low = before.first, before.lower, before.lower_low
    lookup.last, lookup.upper, lookup.upper_low = (u16(before.page + 12) - PAGE_HEADER) >> 1, upper, 0
    while lookup.first + step < lookup.last:
        node = node_at(lookup.page, lookup.first + step, map.page_bytes)
        if node == NULL:
            lookup.outcome = DAMAGED
            return
        high, low = high_of(node), low_of(node)
        if compare(node, lookup, high, low) > 0:
            lookup.last, lookup.upper, lookup.upper_low = lookup.first + step, high, low
            break
        lookup.first, lookup.lower, lookup.lower_low = lookup.first + step, high, low
        step *= 2
    aim(map, lookup)
    search(map, &lookup, 1)


cdef inline void descend(const Map* map, Lookup* lookup, bint is_leaf) noexcept nogil:
    """Read the node that was found: the record of a leaf's node; of a branch's node the child's number, into `size`."""
    cdef const uint8_t* node = node_at(lookup.page, lookup.first, map.page_bytes)
    cdef uint64_t number
    if node == NULL:
        lookup.outcome = DAMAGED
    elif is_leaf:
        lookup.outcome = take(map, lookup, node) if compare(node, lookup, high_of(node), low_of(node)) == 0 else MISSING
    else:
        number = child_of(node)
        lookup.size = <size_t>number
        if number < map.pages:
            prefetch(map.base + number * map.page_bytes)
            prefetch(map.base + number * map.page_bytes + 64)


# -- the leaves of a version -------------------------------------------------------------------------------------------


cdef bint add_leaves(const Map* map, Directory* directory, uint64_t number, uint64_t first, uint32_t levels) noexcept nogil:
    """Add the leaves that are `levels` below a page to a directory; False if that fails.

    first: no name below the page begins with less.
    """
    cdef Lookup lookup
    cdef Leaf* grown
    cdef const uint8_t* node
    cdef uint32_t i
    if not levels:
        if directory.count == directory.room:
            if directory.room >= LEAVES_MAX:
                return False
            grown = <Leaf*>realloc(directory.leaves, max(directory.room * 2, 1024) * sizeof(Leaf))
            if grown == NULL:
                return False
            directory.leaves, directory.room = grown, max(directory.room * 2, 1024)
        if directory.count and first < directory.leaves[directory.count - 1].first:
            return False  # damaged
        directory.leaves[directory.count].first, directory.leaves[directory.count].page = first, number
        directory.count += 1
        return True
    if not enter(map, &lookup, number, False):
        return False
    for i in range(lookup.last):
        node = node_at(lookup.page, i, map.page_bytes)
        if node == NULL:
            return False
        if i:  # the first node has no name: it begins with the name of the page's parent node
            first = high_of(node)  # a position and an ordinal (from 1 up): no two names begin with the same eight bytes
        if not add_leaves(map, directory, child_of(node), first, levels - 1):
            return False
    return True


cdef inline const uint32_t* start_of(const Directory* directory, uint64_t high) noexcept nogil:
    """Return the entry of `starts` for a name's first bits."""
    return directory.starts + min(high >> (KEYS_BITS - directory.bits), (<uint64_t>1 << directory.bits) - 1)


cdef void find_leaves(const Map* map, const Directory* directory, Lookup** lookups, size_t count) noexcept nogil:
    """Set look-ups to the leaves where their names are, or would be. Works in step, for at most IN_STEP_MAX look-ups."""
    cdef uint32_t low[IN_STEP_MAX]
    cdef uint32_t up, middle
    cdef size_t i
    cdef const Leaf* leaf
    for i in range(count):
        prefetch(start_of(directory, lookups[i].high))
    for i in range(count):
        low[i] = start_of(directory, lookups[i].high)[0]
        prefetch(&directory.leaves[low[i]])
    for i in range(count):
        up = start_of(directory, lookups[i].high)[1]
        while low[i] < up:  # find the first leaf with the same first bits that begins behind the name
            middle = (low[i] + up) >> 1
            if directory.leaves[middle].first <= lookups[i].high:
                low[i] = middle + 1
            else:
                up = middle
        low[i] -= low[i] > 0
        leaf = &directory.leaves[low[i]]
        lookups[i].size, lookups[i].lower = <size_t>leaf.page, leaf.first
        if low[i] + 1 < directory.count:
            lookups[i].upper = leaf[1].first
        prefetch(map.base + leaf.page * map.page_bytes)
        prefetch(map.base + leaf.page * map.page_bytes + 64)


# -- rows in their order -----------------------------------------------------------------------------------------------

cdef inline bint enter_level(const Map* map, const Tree* tree, Walk* walk, uint32_t level, uint64_t number) noexcept nogil:
    if not enter(map, &walk.lookup, number, level + 1 == tree.depth):
        return False
    walk.levels[level].page, walk.levels[level].at, walk.levels[level].nodes = walk.lookup.page, 0, walk.lookup.last
    return True


cdef inline const uint8_t* node_of(const Map* map, const Walk* walk, uint32_t level) noexcept nogil:
    return node_at(walk.levels[level].page, walk.levels[level].at, map.page_bytes)


cdef int seek(const Map* map, const Tree* tree, Walk* walk, const Lookup* wanted, bint is_floor) noexcept nogil:
    """Set a walk to the first row with the wanted name or a greater one. FOUND, MISSING if there is none, or DAMAGED.

    is_floor: to the last row of its leaf with the wanted name or a lesser one; MISSING may then be wrong.
    """
    cdef uint64_t number = tree.root
    cdef uint32_t level, low, up, middle
    cdef const uint8_t* node
    cdef bint is_leaf
    cdef int order
    if not tree.depth:
        return MISSING
    for level in range(tree.depth):
        is_leaf = level + 1 == tree.depth
        if not enter_level(map, tree, walk, level, number):
            return DAMAGED
        low, up = (0 if is_leaf else 1), walk.levels[level].nodes
        while low < up:
            middle = (low + up) >> 1
            node = node_at(walk.levels[level].page, middle, map.page_bytes)
            if node == NULL:
                return DAMAGED
            order = compare(node, wanted, high_of(node), low_of(node))
            # The rows below a branch's node begin with the node's name.
            if order < 0 or (order == 0 and (is_floor or not is_leaf)):
                low = middle + 1
            else:
                up = middle
        if not is_leaf:
            walk.levels[level].at = low - 1
            node = node_of(map, walk, level)
            if node == NULL:
                return DAMAGED
            number = child_of(node)
    if is_floor:
        walk.levels[level].at = low - 1
        return FOUND if low else MISSING
    walk.levels[level].at = low - (low == walk.levels[level].nodes)
    return advance(map, tree, walk) if low == walk.levels[level].nodes else FOUND


cdef int advance(const Map* map, const Tree* tree, Walk* walk) noexcept nogil:
    """Move a walk to the next row. FOUND, MISSING if there is none, or DAMAGED."""
    cdef uint32_t level = tree.depth - 1
    cdef const uint8_t* node
    walk.levels[level].at += 1
    while walk.levels[level].at >= walk.levels[level].nodes:
        if not level:
            return MISSING
        level -= 1
        walk.levels[level].at += 1
    while level + 1 < tree.depth:
        node = node_of(map, walk, level)
        if node == NULL or not enter_level(map, tree, walk, level + 1, child_of(node)):
            return DAMAGED
        level += 1
        if level + 1 == tree.depth and walk.levels[level - 1].at + 1 < walk.levels[level - 1].nodes:
            node = node_at(walk.levels[level - 1].page, walk.levels[level - 1].at + 1, map.page_bytes)
            if node != NULL:
                prefetch_page(map, child_of(node))
    return FOUND


cdef inline bint may_be_empty(const uint8_t* payload, int64_t now_ms) noexcept nogil:
    """Return whether all fields of a large map may have expired."""
    cdef int64_t due_ms = <int64_t>u64(payload + 24)
    return 0 < due_ms <= now_ms and u64(payload + 16) >= u64(payload + 8)


cdef class Pages:
    """The pages of one store in the version that a read transaction sees. For one thread at a time.

    The object belongs to an open environment of py-lmdb. It has no transaction of its own: `learn` takes the caller's.
    """

    def __cinit__(self, env, file):
        """Find where the environment is mapped. `file`: an open descriptor of its data file, which stays open."""
        cdef Py_buffer record
        self.file = file
        self.is_readable = False
        self.cache = NULL
        memset(&self.directory, 0, sizeof(Directory))
        self.main = env.open_db(None)
        self.map.page_bytes = env.stat()["psize"]
        if self.map.page_bytes < 4096 or self.map.page_bytes > 65536 or self.map.page_bytes & (self.map.page_bytes - 1):
            return
        if <long>self.map.page_bytes > sysconf(_SC_PAGESIZE):
            return  # a file from another machine: its pages need not begin where the system's do
        self.mapped_pages = env.info()["map_size"] // self.map.page_bytes
        with env.begin(db=self.main, buffers=True) as txn:
            found = txn.get(b"keys")
            if found is None or len(found) != TABLE_BYTES:
                return
            PyObject_GetBuffer(found, &record, PyBUF_SIMPLE)
            try:
                self.is_readable = self.find_base(<const uint8_t*>record.buf)
            finally:
                PyBuffer_Release(&record)

    def __dealloc__(self):
        free(self.cache)
        free(self.directory.leaves)
        free(self.directory.starts)

    cdef bint find_base(self, const uint8_t* record) except -1:
        """Find where the map begins, given a record in it; False if that is not certain."""
        cdef const uint8_t* page = record - (<size_t>record % self.map.page_bytes)
        cdef uint64_t number = u64(page)
        self.count_pages()
        if number >= self.map.pages or <size_t>page < number * self.map.page_bytes:
            return False
        self.map.base = page - number * self.map.page_bytes
        # A page's number is trusted only if the file has the same page at that number: a damaged number would lead out of
        # the map. Until this check nothing is read through the map.
        return self.is_store() and self.is_at(page, number)

    cdef bint is_store(self) noexcept:
        """Return whether the file's first page is a meta page of the version that is read here."""
        cdef uint8_t meta[PAGE_HEADER + 8]
        if pread(self.file, meta, sizeof(meta), 0) != sizeof(meta):
            return False
        return u64(meta + PAGE_HEADER) == (<uint64_t>DATA_VERSION << 32 | <uint32_t>MAGIC)

    cdef bint is_at(self, const uint8_t* page, uint64_t number) except -1:
        """Return whether the file has the same bytes at the page of this number."""
        cdef uint8_t* read = <uint8_t*>malloc(self.map.page_bytes)
        cdef ssize_t size = self.map.page_bytes
        cdef bint is_same
        if read == NULL:
            raise MemoryError
        is_same = pread(self.file, read, size, number * size) == size and memcmp(read, page, size) == 0
        free(read)
        return is_same

    cdef void count_pages(self) noexcept:
        """Count the pages: memory behind the end of the file or of the map must not be read."""
        cdef struct_stat found
        cdef uint64_t pages = <uint64_t>found.st_size // self.map.page_bytes if fstat(self.file, &found) == 0 else 0
        self.map.pages = min(pages, self.mapped_pages)

    cdef bint is_newest(self) noexcept:
        """Return whether no transaction was committed after the version that `learn` read. Only while the store is open.

        The file's first two pages have the numbers of the last two transactions. False if they cannot be read.
        """
        cdef const uint8_t* number = self.map.base + PAGE_HEADER + META_TRANSACTION_AT
        if not self.is_readable or self.map.pages < 2:
            return False
        return max(u64(number), u64(number + self.map.page_bytes)) == self.version

    def learn(self, txn):
        """Read the roots of the tables in the version that a transaction sees; False if that fails."""
        if not self.is_readable:
            return False
        self.count_pages()
        self.version = txn.id()
        if self.cache != NULL:
            memset(self.cache, 0, CACHED_MAX * sizeof(CachedRecord))
        memset(self.checked, 0, sizeof(self.checked))
        self.directory.is_built, self.directory.lookups = False, 0
        get, main = txn.get, self.main
        self.keys.upper = KEYS_UPPER
        return (
            self.learn_tree(&self.keys, get(b"keys", db=main))
            and self.learn_tree(&self.fields, get(b"fields", db=main))
            and self.learn_tree(&self.blocks, get(b"blocks", db=main))
        )

    def populate(self, size_t bytes_max):
        """Have the system map the file's pages, up to `bytes_max`; return the number of mapped bytes.

        A newly opened store is slow until its pages are mapped. The call takes about 0.2 s per GB in memory and
        releases the interpreter's lock: run it in a thread. The call reads no page itself, so the store may be closed
        meanwhile.
        """
        cdef size_t end = min(bytes_max, self.map.pages * self.map.page_bytes), at = 0, step
        cdef const uint8_t* base = self.map.base
        cdef int advice = POPULATE_READ
        if not self.is_readable:
            return 0
        with nogil:
            while at < end:
                step = min(end - at, POPULATE_STEP_BYTES)
                if madvise(<void*>(base + at), step, advice) != 0:
                    if advice != POPULATE_READ or errno != EINVAL:
                        break
                    advice = MADV_WILLNEED  # before Linux 5.14
                    continue
                at += step
        return at

    cdef bint learn_tree(self, Tree* tree, bytes record) except -1:
        cdef const uint8_t* at
        if record is None or len(record) != TABLE_BYTES:
            return False
        at = <const uint8_t*>record
        tree.depth, tree.leaves, tree.root = u16(at + 6), u64(at + 16), u64(at + 40)
        return u16(at + 4) == 0 and tree.depth <= DEPTH_MAX and (tree.depth == 0 or tree.root < self.map.pages)

    cdef void find(self, const Tree* tree, Lookup** lookups, size_t count) noexcept nogil:
        """Look up all names, in step. Each look-up gets its outcome, and its record if it is FOUND."""
        cdef size_t i = 0
        while i < count:
            self.walk(tree, lookups + i, min(count - i, <size_t>IN_STEP_MAX))
            i += IN_STEP_MAX
        # After the walk, while the records are being prefetched.
        for i in range(count):
            if lookups[i].outcome == FOUND:
                lookups[i].outcome = check(lookups[i]) if lookups[i].size < LONG_BYTES else self.check_long(lookups[i])

    cdef int check_long(self, Lookup* lookup) noexcept nogil:
        """Compare a record with its checksum, as `check` does, but at most once a millisecond in this version."""
        cdef CheckedRecord* checked = &self.checked[(<uint64_t>lookup.record >> 5) & (CHECKED_MAX - 1)]
        if self.moment_ms and checked.record == lookup.record and checked.checked_ms == self.moment_ms:
            lookup.size -= CHECK_BYTES
            return FOUND
        checked.record, checked.checked_ms = lookup.record, self.moment_ms
        if check(lookup) != FOUND:
            checked.record = NULL
            return DAMAGED
        return FOUND

    cdef bint has_directory(self, size_t lookups) noexcept nogil:
        """Return whether there is a directory of the leaves of `keys`; build it once it is worth its cost."""
        cdef Directory* directory = &self.directory
        if not directory.is_built:
            directory.lookups += lookups
            if self.keys.depth < 2 or directory.lookups * LEAVES_PER_LOOKUP < self.keys.leaves:
                return False
            directory.is_built = True
            directory.count = 0
            if self.keys.leaves > LEAVES_MAX or not self.build_directory():
                directory.count = 0
        return directory.count > 0

    cdef bint build_directory(self) noexcept nogil:
        """Read the branches of `keys`; False if one is damaged, which a walk will find, or memory is short."""
        cdef Directory* directory = &self.directory
        cdef uint32_t* starts
        cdef size_t i, value = 0, values
        cdef int bits = 1
        if not add_leaves(&self.map, directory, self.keys.root, 0, self.keys.depth - 1):
            return False
        while bits < DIRECTORY_BITS_MAX and (<size_t>1 << bits) < directory.count:
            bits += 1
        values = <size_t>1 << bits
        if bits != directory.bits:
            starts = <uint32_t*>realloc(directory.starts, (values + 1) * sizeof(uint32_t))
            if starts == NULL:
                return False
            directory.starts, directory.bits = starts, bits
        for i in range(directory.count):
            while value < values and directory.leaves[i].first >> (KEYS_BITS - bits) >= value:
                directory.starts[value] = <uint32_t>i
                value += 1
        while value <= values:
            directory.starts[value] = <uint32_t>directory.count
            value += 1
        return True

    cdef void walk(self, const Tree* tree, Lookup** lookups, size_t count) noexcept nogil:
        """Look up at most IN_STEP_MAX names, but do not check the records: they still end with their checksums."""
        cdef const Map* map = &self.map
        cdef size_t i
        cdef uint32_t level, first = 0
        cdef bint is_leaf
        begin(tree, lookups, count)
        if tree == &self.keys and self.has_directory(count):
            find_leaves(map, &self.directory, lookups, count)
            first = tree.depth - 1
        for level in range(first, tree.depth):
            is_leaf = level + 1 == tree.depth
            for i in range(count):
                if lookups[i].outcome == FOUND:
                    if enter(map, lookups[i], lookups[i].size, is_leaf):
                        aim(map, lookups[i])
                    else:
                        lookups[i].outcome = DAMAGED
            search(map, lookups, count)
            for i in range(count):
                if lookups[i].outcome == FOUND:
                    descend(map, lookups[i], is_leaf)

    cdef void walk_sorted(self, const Tree* tree, Lookup** lookups, size_t count) noexcept nogil:
        """Look up 1 to IN_STEP_MAX ascending names as `walk` does, in a table that is not empty.

        Names below one page are a group, and go down together: the search is for the group's first name, its head.
        """
        cdef const Map* map = &self.map
        cdef Lookup* heads[IN_STEP_MAX]
        cdef Lookup* before
        cdef size_t starts[IN_STEP_MAX + 1]  # of the groups
        cdef size_t below[IN_STEP_MAX]  # those of the next level
        cdef uint64_t uppers[IN_STEP_MAX]  # of each group: no name on its page begins with more
        cdef size_t groups = 1, groups_below, group, i
        cdef uint32_t level
        begin(tree, lookups, 1)
        starts[0] = 0
        for level in range(tree.depth):
            starts[groups] = count
            for group in range(groups):
                before = heads[group] = lookups[starts[group]]
                uppers[group] = before.upper
                if before.outcome == FOUND:
                    if enter(map, before, before.size, level + 1 == tree.depth):
                        aim(map, before)
                    else:
                        before.outcome = DAMAGED
            search(map, heads, groups)
            if level + 1 == tree.depth:
                break
            groups_below = 0
            for group in range(groups):
                before = heads[group]
                below[groups_below] = starts[group]
                groups_below += 1
                for i in range(starts[group] + 1, starts[group + 1]):
                    if before.outcome == FOUND and lookups[i].high >= before.upper:
                        search_behind(map, before, lookups[i], uppers[group])
                        before = lookups[i]
                        below[groups_below] = i
                        groups_below += 1
            groups = groups_below
            for group in range(groups):
                starts[group] = below[group]
                before = lookups[starts[group]]
                if before.outcome == FOUND:
                    descend(map, before, False)
                    if level + 2 == tree.depth:
                        prefetch_page(map, before.size)
        for group in range(groups):
            before = heads[group]
            for i in range(starts[group] + 1, starts[group + 1]):
                if before.outcome == FOUND:
                    search_behind(map, before, lookups[i], uppers[group])
                else:
                    lookups[i].outcome = DAMAGED
                before = lookups[i]
        for i in range(count):
            if lookups[i].outcome == FOUND:
                descend(map, lookups[i], True)

    def scan(self, ranges, int64_t count, int64_t visits_max, int64_t bytes_max, int64_t now_ms, uint32_t forms, bint expire):
        """Do one call of a scan as `LmdbSnapshot.scan` does; return the next position (0 at the end) and keys.

        ranges: [first, last) positions. forms: a bit for each form of record to return. expire: only keys that expire.
        Returns None if py-lmdb has to do the call: because of a damaged page or record, or of a map whose fields expire.
        """
        cdef Walk walk
        cdef Lookup* lookup = &walk.lookup
        cdef uint64_t start, end, name, last = 0
        cdef int64_t left = count, visits = 0, visited = 0, expire_at_ms
        cdef uint32_t key_bytes, form
        cdef int outcome
        cdef list found = []
        for start, end in ranges:
            outcome = self.first_row(&self.keys, &walk, start << 16, 0, False)
            while outcome == FOUND and lookup.high >> 16 < end:
                name = lookup.high
                # Names must ascend: damaged pages could lead in a circle.
                if lookup.bytes_ not in (POSITION_BYTES, PLACE_BYTES) or name < start << 16 or (visits and name <= last):
                    return None
                if (left <= 0 or visits >= visits_max or visited >= bytes_max) and name >> 16 != last >> 16:
                    return name >> 16, found
                last = name
                visits += 1
                visited += lookup.size + CHECK_BYTES
                if lookup.size < HEADER_BYTES or u32(lookup.record) > lookup.size - HEADER_BYTES:
                    return None
                key_bytes, form = u32(lookup.record), lookup.record[FORM_AT]
                expire_at_ms = <int64_t>u64(lookup.record + EXPIRY_AT)
                if form > LARGE_SORTED_SET:
                    return None
                if form == LARGE_MAP:
                    if lookup.size != HEADER_BYTES + key_bytes + LARGE_MAP_BYTES:
                        return None
                    if may_be_empty(lookup.record + HEADER_BYTES + key_bytes, now_ms):
                        return None
                if not 0 < expire_at_ms <= now_ms:
                    left -= 1
                    if forms >> form & 1 and (expire_at_ms or not expire):
                        found.append(PyBytes_FromStringAndSize(<const char*>lookup.record + HEADER_BYTES, key_bytes))
                outcome = self.next_row(&self.keys, &walk)
            if outcome == DAMAGED:
                return None
        return 0, found

    cdef int first_row(self, const Tree* tree, Walk* walk, uint64_t high, uint64_t low, bint is_floor) noexcept nogil:
        """Read the first row whose name begins with two numbers, or with greater ones. FOUND, MISSING or DAMAGED.

        The row is in the walk's `lookup`. is_floor: see `seek`.
        """
        cdef int outcome
        walk.lookup.high, walk.lookup.low, walk.lookup.bytes_ = high, low, NAME_BYTES_MAX if is_floor else 0
        outcome = seek(&self.map, tree, walk, &walk.lookup, is_floor)
        return self.read_row(tree, walk) if outcome == FOUND else outcome

    cdef int next_row(self, const Tree* tree, Walk* walk) noexcept nogil:
        """Read the row after that of a walk. FOUND, MISSING or DAMAGED."""
        cdef int outcome = advance(&self.map, tree, walk)
        return self.read_row(tree, walk) if outcome == FOUND else outcome

    cdef int read_row(self, const Tree* tree, Walk* walk) noexcept nogil:
        cdef const uint8_t* node = node_of(&self.map, walk, tree.depth - 1)
        cdef Lookup* lookup = &walk.lookup
        if node == NULL:
            return DAMAGED
        lookup.page = walk.levels[tree.depth - 1].page
        lookup.high, lookup.low, lookup.bytes_ = high_of(node), low_of(node), u16(node + 6)
        return check(lookup) if take(&self.map, lookup, node) == FOUND else DAMAGED

    cdef int find_block(self, Lookup* lookup, int64_t moment_ms) noexcept nogil:
        """Look up one name of sixteen bytes in `blocks`, and return its outcome.

        moment_ms: a reading of a monotonic clock. Records that were found in this version are cached; the checksum of a
        cached record is compared at most once a millisecond.
        """
        cdef CachedRecord* cached = NULL
        if self.cache == NULL:
            self.cache = <CachedRecord*>calloc(CACHED_MAX, sizeof(CachedRecord))
        if self.cache != NULL:
            cached = &self.cache[(lookup.low ^ lookup.high * CACHE_SPREAD) & (CACHED_MAX - 1)]
            if cached.record != NULL and cached.low == lookup.low and cached.high == lookup.high:
                lookup.record, lookup.size, lookup.outcome = cached.record, cached.size, FOUND
                if cached.checked_ms != moment_ms:
                    lookup.size += CHECK_BYTES
                    lookup.outcome = check(lookup)
                    cached.checked_ms = moment_ms
                    if lookup.outcome != FOUND:
                        cached.record = NULL
                return lookup.outcome
        self.moment_ms = moment_ms
        self.find(&self.blocks, &lookup, 1)
        if cached != NULL and lookup.outcome == FOUND:
            cached.high, cached.low, cached.checked_ms = lookup.high, lookup.low, moment_ms
            cached.record, cached.size = lookup.record, lookup.size
        return lookup.outcome


def hashes(bytes key):
    """Return a key's slot, CRC32 and CRC16, for tests."""
    cdef const uint8_t* text = <const uint8_t*>key
    return slot_of(text, len(key)), crc32_of(text, len(key)), crc16_of(text, len(key))


def is_newest(Pages pages):
    """Return whether the learned version is the newest of its store; for tests."""
    return bool(pages.is_newest())


def look_up_block(Pages pages, bytes name, int64_t moment_ms):
    """Look up a name in `blocks` as nodes of sorted sets are looked up; ValueError if it is damaged. For tests."""
    cdef Lookup found
    found.high, found.low = swap64(u64(<const uint8_t*>name)), swap64(u64(<const uint8_t*>name + 8))
    found.bytes_ = 16
    if pages.find_block(&found, moment_ms) == DAMAGED:
        raise ValueError("damaged")
    return (<const char*>found.record)[: found.size] if found.outcome == FOUND else None


def look_up(Pages pages, str table, list names, int64_t moment_ms=0):
    """Return the records of names in a table, None for missing ones; ValueError if one is damaged. For tests."""
    cdef Lookup found[64]
    cdef Lookup* each[64]
    cdef const Tree* tree = &pages.keys if table == "keys" else &pages.fields if table == "fields" else &pages.blocks
    cdef size_t i
    cdef bytes name
    if len(names) > 64:
        raise ValueError("at most 64 names")
    for i in range(len(names)):
        name = names[i]
        padded = name.ljust(16, b"\0")
        found[i].high = swap64(u64(<const uint8_t*><bytes>padded))
        found[i].low = swap64(u64(<const uint8_t*><bytes>padded + 8))
        found[i].bytes_ = len(name)
        each[i] = &found[i]
    pages.moment_ms = moment_ms
    pages.find(tree, each, len(names))
    records = []
    for i in range(len(names)):
        if found[i].outcome == DAMAGED:
            raise ValueError("damaged")
        records.append((<const char*>found[i].record)[: found[i].size] if found[i].outcome == FOUND else None)
    return records
