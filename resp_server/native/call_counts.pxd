"""Counts of one command's calls, until they are added to the server's statistics."""

from libc.stdint cimport uint64_t

from resp_server.native.bits cimport count_leading_zeros

cdef struct CallCounts:
    uint64_t calls, nanoseconds
    uint64_t times[64]  # of calls, by the bits of their nanoseconds


cdef inline void count_calls(CallCounts* counts, uint64_t calls, uint64_t nanoseconds) noexcept nogil:
    """Count calls that took so long each."""
    counts.calls += calls
    counts.nanoseconds += calls * nanoseconds
    counts.times[min(64 - count_leading_zeros(nanoseconds), 63) if nanoseconds else 0] += calls


cdef inline int move_counts(CallCounts* counts, command_stats) except -1:
    """Add the counts to a command's statistics."""
    cdef int bits
    if not counts.calls:
        return 0
    command_stats.calls += counts.calls
    command_stats.nanoseconds += counts.nanoseconds
    took = command_stats.took
    for bits in range(64):
        if counts.times[bits]:
            took[bits] += counts.times[bits]
            counts.times[bits] = 0
    counts.calls = counts.nanoseconds = 0
    return 0
