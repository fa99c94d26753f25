"""The protocol as compiled modules share it: requests cut into words, names of commands, lines written to an output."""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport realloc
from libc.string cimport memcmp, memcpy, memmove

cdef enum:
    NUMBER_LINE_BYTES = 24  # a type byte, a sign, 19 digits and a line end are 23
    COMMAND_BYTES_MAX = 24
    SPECS_MAX = 511
    NAME_HASHES = 512

cdef struct Word:
    const uint8_t* at
    size_t size

cdef struct Output:
    char* data
    size_t used
    size_t size

cdef struct Spec:  # a command, and the minimum and maximum of words in its requests, as the module counts them
    uint64_t name[3]  # in lower case, padded with zeros
    uint64_t case_bits[3]  # of its letters: the bit that tells upper from lower case
    uint32_t size
    uint32_t least
    uint32_t most
    uint8_t words  # of the name, which may be a container's and a subcommand's: `object|encoding`; 0: a container without one
    uint16_t next  # the index + 1 of the next command whose name has the same hash; 0: none

cdef struct Specs:
    Spec rows[SPECS_MAX]
    uint16_t first[NAME_HASHES]  # the index + 1 of the first command for each hash of a name; 0: none
    int count
    uint8_t last_name[COMMAND_BYTES_MAX]  # of the last command that was found, as typed, if it is one word
    size_t last_name_bytes
    int last


cdef inline int reserve(Output* out, size_t more) except -1:
    cdef size_t size
    cdef char* data
    if out.used + more <= out.size:
        return 0
    size = (out.used + more) * 2
    data = <char*>realloc(out.data, size)
    if data == NULL:
        raise MemoryError
    out.data, out.size = data, size
    return 0


cdef inline int put(Output* out, const void* data, size_t size) except -1:
    reserve(out, size)
    memcpy(out.data + out.used, data, size)
    out.used += size
    return 0


cdef inline int write_line(char* line, char type_byte, int64_t number) noexcept nogil:
    """Write a type byte, a number and a line end: at most NUMBER_LINE_BYTES. Return the number of bytes."""
    cdef char text[NUMBER_LINE_BYTES]
    cdef int at = NUMBER_LINE_BYTES - 2
    cdef uint64_t rest = 0 - <uint64_t>number if number < 0 else <uint64_t>number
    text[at], text[at + 1] = c"\r", c"\n"
    while True:
        at -= 1
        text[at] = <char>(c"0" + rest % 10)
        rest //= 10
        if not rest:
            break
    if number < 0:
        at -= 1
        text[at] = c"-"
    at -= 1
    text[at] = type_byte
    memcpy(line, text + at, NUMBER_LINE_BYTES - at)
    return NUMBER_LINE_BYTES - at


cdef inline int put_line(Output* out, char type_byte, int64_t number) except -1:
    """Append a type byte, a number and a line end."""
    reserve(out, NUMBER_LINE_BYTES)
    out.used += write_line(out.data + out.used, type_byte, number)
    return 0


cdef inline int put_bulk(Output* out, const void* data, size_t size) except -1:
    reserve(out, size + 32)
    put_line(out, c"$", size)
    memcpy(out.data + out.used, data, size)
    out.used += size
    out.data[out.used], out.data[out.used + 1] = c"\r", c"\n"
    out.used += 2
    return 0


cdef inline int put_nil(Output* out, bint is_resp3) except -1:
    return put(out, b"_\r\n", 3) if is_resp3 else put(out, b"$-1\r\n", 5)


cdef inline int put_double_text(Output* out, const char* text, size_t size, bint is_resp3) except -1:
    if not is_resp3:
        return put_bulk(out, text, size)
    put(out, b",", 1)
    put(out, text, size)
    return put(out, b"\r\n", 2)


cdef inline int insert(Output* out, size_t before, const char* head, size_t size) except -1:
    """Write a head in front of what was written from `before` on."""
    reserve(out, size)
    memmove(out.data + before + size, out.data + before, out.used - before)
    memcpy(out.data + before, head, size)
    out.used += size
    return 0


cdef inline int insert_scan_head(Output* out, size_t before, uint64_t cursor, int64_t count) except -1:
    """Write the head of a scan's reply whose elements were written from `before` on."""
    cdef char head[4 * NUMBER_LINE_BYTES]
    cdef char number[NUMBER_LINE_BYTES]
    cdef size_t size, digits = write_line(number, c"$", cursor) - 3
    memcpy(head, b"*2\r\n", 4)
    size = 4 + write_line(head + 4, c"$", digits)
    memcpy(head + size, number + 1, digits + 2)
    size += digits + 2
    size += write_line(head + size, c"*", count)
    return insert(out, before, head, size)


cdef inline Py_ssize_t number_line(const uint8_t* at, const uint8_t* end, size_t* number) noexcept nogil:
    """Parse a number in its canonical form, and its line end; return the number of bytes.

    0: the line is incomplete. -1: it has no such number.
    """
    cdef const uint8_t* start = at
    cdef size_t found = 0
    while at < end and c"0" <= at[0] <= c"9":
        found = found * 10 + (at[0] - c"0")
        at += 1
        if at - start > 9:
            return -1
    if end - at < 2:
        return 0 if at == end or at[0] == c"\r" else -1
    if at == start or at[0] != c"\r" or at[1] != c"\n" or (start[0] == c"0" and at - start > 1):
        return -1
    number[0] = found
    return at + 2 - start


cdef inline Py_ssize_t parse_request(
    const uint8_t* start, const uint8_t* end, Word* words, size_t words_max, size_t word_bytes_max, size_t* count
) noexcept nogil:
    """Cut one request into words; return the number of bytes.

    0: the request is incomplete. -1: the general path has to parse it.
    """
    cdef const uint8_t* at = start
    cdef size_t total = 0, size = 0, i
    cdef Py_ssize_t took
    if at == end:
        return 0
    if at[0] != c"*":
        return -1
    took = number_line(at + 1, end, &total)
    if took <= 0:
        return took
    if total == 0 or total > words_max:
        return -1
    at += 1 + took
    for i in range(total):
        if at == end:
            return 0
        if at[0] != c"$":
            return -1
        took = number_line(at + 1, end, &size)
        if took <= 0:
            return took
        at += 1 + took
        if size > word_bytes_max:
            return -1
        if <size_t>(end - at) < size + 2:
            return 0
        if at[size] != c"\r" or at[size + 1] != c"\n":
            return -1
        words[i].at, words[i].size = at, size
        at += size + 2
    count[0] = total
    return at - start


cdef inline bytes bytes_of(const Word* word):
    return PyBytes_FromStringAndSize(<const char*>word.at, word.size)


cdef inline list bytes_list_of(const Word* words, size_t count):
    cdef size_t i
    return [bytes_of(&words[i]) for i in range(count)]


cdef inline uint32_t name_hash(const uint64_t* name) noexcept nogil:
    """Return a hash of a name in any case, padded with zeros."""
    cdef uint64_t bits = 0x2020202020202020ULL
    cdef uint64_t mixed = (name[0] | bits) * 0x9E3779B97F4A7C15ULL ^ (name[1] | bits) * 0xC2B2AE3D27D4EB4FULL
    return <uint32_t>((mixed ^ (name[2] | bits) * 0x165667B19E3779F9ULL) >> 55)


cdef inline int add_spec(Specs* specs, bytes name, uint32_t least, uint32_t most, bint is_container=False) except -1:
    """Add a command; return its index. Its name has at most COMMAND_BYTES_MAX bytes. is_container: it is sent without a subcommand."""
    cdef bytes padded = name.ljust(COMMAND_BYTES_MAX, b"\0")
    cdef int i, index = specs.count
    cdef Spec* spec
    cdef uint8_t* case_bits
    cdef uint32_t hash_of_name
    if index == SPECS_MAX:
        raise ValueError(f"at most {SPECS_MAX} commands have a row")
    spec = &specs.rows[index]
    case_bits = <uint8_t*>spec.case_bits
    spec.size, spec.least, spec.most = len(name), least, most
    spec.words = 0 if is_container else 1 + (b"|" in name)
    memcpy(spec.name, <const char*>padded, COMMAND_BYTES_MAX)
    for i in range(COMMAND_BYTES_MAX):
        case_bits[i] = 0x20 if c"a" <= padded[i] <= c"z" else 0
    hash_of_name = name_hash(spec.name)
    spec.next = specs.first[hash_of_name]
    specs.first[hash_of_name] = <uint16_t>(index + 1)
    specs.count += 1
    return index


cdef inline int command_of(const Specs* specs, const Word* name) noexcept nogil:
    """Return the index of the command with a name, in any case; -1: none of the commands has it."""
    cdef uint64_t typed[3]
    cdef const Spec* spec
    cdef int index
    if name.size > COMMAND_BYTES_MAX:
        return -1
    typed[0] = typed[1] = typed[2] = 0
    memcpy(typed, name.at, name.size)
    index = specs.first[name_hash(typed)]
    while index:
        spec = &specs.rows[index - 1]
        # With its case bit set, a byte equals a letter of the name only if it is that letter, in either case.
        if (
            spec.size == name.size
            and (typed[0] | spec.case_bits[0]) == spec.name[0]
            and (typed[1] | spec.case_bits[1]) == spec.name[1]
            and (typed[2] | spec.case_bits[2]) == spec.name[2]
        ):
            return index - 1
        index = spec.next
    return -1


cdef inline int command_at(Specs* specs, const Word* words, size_t count) noexcept nogil:
    """Return the index of a request's command; -1: none of the commands has its first word, or its first two words."""
    cdef uint8_t name[COMMAND_BYTES_MAX]
    cdef Word both
    cdef int command
    # Most requests have the command of the one before: to find it by its name again costs a fifth of a GET.
    if words.size and words.size == specs.last_name_bytes and memcmp(words.at, specs.last_name, words.size) == 0:
        return specs.last
    command = command_of(specs, words)
    if command >= 0 and specs.rows[command].words == 1:
        specs.last, specs.last_name_bytes = command, words.size
        memcpy(specs.last_name, words.at, words.size)
        return command
    if command >= 0 and (specs.rows[command].words or count == 1):
        return -1 if specs.rows[command].words else command
    both.at, both.size = name, words[0].size + 1 + words[1].size if count > 1 else COMMAND_BYTES_MAX + 1
    if both.size > COMMAND_BYTES_MAX:
        return -1
    memcpy(name, words[0].at, words[0].size)
    name[words[0].size] = c"|"
    memcpy(name + words[0].size + 1, words[1].at, words[1].size)
    return command_of(specs, &both)
