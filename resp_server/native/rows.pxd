"""What a row of the core's table of commands says (`ROWS`): the kind of a command's keys, what of a key it reads, and its reply."""

from resp_server.native.wire cimport Specs

# The kinds of keys.
cdef enum:
    ANY_KIND, STRING, HASH, LIST, SET, SORTED_SET, STREAM

# What of a key a command reads. The arguments after the key are members (or fields), a range's ends and options, or none.
cdef enum:
    NOTHING  # it has no key
    ALL_KEYS
    TRANSACTION  # MULTI, EXEC or DISCARD
    KEYS  # all arguments are keys
    FACT  # the type, or the expiry
    ROW_SIZE  # the bytes that the key's row takes
    SIZE  # the number of elements, or of a value's bytes
    WHOLE
    BYTES  # a range of a value's bytes
    BITS
    BIT_FIELDS
    MEMBERS
    TWO_MEMBERS  # their distance
    INDEXES  # an element or a range of a list
    RANKS  # a range of a sorted set
    SCORES  # a range by score
    TEXT_RANGE  # a range of a sorted set's members
    RANDOM  # one element, or some
    SEARCH  # for an element of a list
    COMBINED  # several sets
    SORTED  # all elements, in an order
    SCAN  # elements from a cursor on
    AREA  # members whose scores are points in an area
    READS  # the number of these

# What the reply has.
cdef enum:
    TEXTS  # values, elements or members; one, or nil, where the command reads one
    FIELDS
    PAIRS
    FLAGS  # whether something exists
    LENGTHS
    SCORES_OF
    RANKS_OF
    REVERSED_RANKS_OF
    TYPES
    ENCODINGS
    SECONDS
    MILLISECONDS
    SECONDS_AT  # a time, not a duration
    MILLISECONDS_AT
    NONE_OR_ZERO  # nil, or a number that is the same for all keys
    NONE_OR_ONE
    NONE_OR_ERROR
    PLACES
    NUMBERS  # integers of some bits
    DUMPS
    IN_ALL  # members of the first set that are in all others, or in none; those of all sets; or the number of the first
    IN_ANY
    IN_FIRST
    COUNT_IN_ALL
    FROM_LOWEST  # elements from the lowest rank, or from the highest
    FROM_HIGHEST
    CLIENT_ID
    CACHING  # OK, and CLIENT CACHING is set
    CLOCK
    DATABASE
    KEY_COUNT  # of all jobs
    ALL_TEXTS
    ONE_TEXT
    POINTS
    GEOHASHES
    WITHIN  # members, from options that name the area's center and shape; or these come first
    AROUND_POINT
    AROUND_MEMBER
    WATCHED  # OK, and the client watches the keys
    READ_POINT  # OK, and the next transaction reads at these epochs
    OK
    REPLIES  # to the queued requests

cdef enum:
    COMMANDS_MAX = 128

cdef struct Row:
    int kind
    int reads
    int reply
    bint is_array
    bint is_two_words  # its name is a container's and a subcommand's
    bint has_any_slots  # its keys may be in several slots of a cluster
    int first_member  # the argument at which its members or fields begin
    bint has_key_count  # its first argument is the number of keys

# The form of a kind's small records, whose elements are in the record, and that of its large ones.
cdef int[7] SMALL_FORMS
cdef int[7] LARGE_FORMS

cdef Specs specs  # of the core's commands
cdef Row rows[COMMANDS_MAX]  # of the same commands
cdef int COMMANDS  # their number
cdef int MULTI, EXEC, DISCARD, FREQ  # the indexes of these commands


cdef inline bint is_queueable(const Row* row) noexcept nogil:
    """Return whether the core queues a command in a transaction: it is not about the connection's next requests."""
    return row.reply not in (CACHING, READ_POINT, WATCHED)
