# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The commands that a forwarder forwards: who answers them, where their keys are, and how replies are joined."""

from libc.stdint cimport int64_t
from libc.string cimport memset

from resp_server.native.raw_replies cimport number_in
from resp_server.native.wire cimport SPECS_MAX, Word, add_spec
from resp_server.backends.servers.native.client_batch cimport ARRAY, COUNTED, DRAWN, LISTED, NOT_JOINED, SCANNED, SUM

from resp_server.command.policy import ReplyMerge, SpecialCommand

# How the replies of the states and of the upstream to a command about all keys are joined, by the command.
LISTINGS = {SpecialCommand.DBSIZE: COUNTED, SpecialCommand.KEYS: LISTED, SpecialCommand.RANDOMKEY: DRAWN, SpecialCommand.SCAN: SCANNED}


cdef class ForwardedCommands:
    """A table of commands. A request's command is found by its name (`command_at`); its index is that of its row."""

    def __init__(self, commands, server):
        self.names, self.stats, self.indexes = [], [], {}
        self.add_reads_of_states(commands)
        for each in server.table.with_subcommands():
            if each.policy.special is SpecialCommand.CLIENT_CACHING:
                self.caching = self.add(each.name, 0, 0, (), None, server.stats.command_stats(each.name))

    cdef int add(self, name, least, most, keys, special, command_stats, is_container=False) except -1:
        """Add a command; return its index."""
        cdef int i = add_spec(&self.specs, name.encode(), least, most, is_container)
        cdef Plan* plan = &self.plans[i]
        cdef KeyRange* keys_of_range
        memset(plan, 0, sizeof(Plan))
        plan.listing = LISTINGS.get(special, NOT_JOINED)
        plan.part = BEGIN if special is SpecialCommand.MULTI else RUN if special is SpecialCommand.EXEC else WATCHED if special is SpecialCommand.WATCH else QUEUED
        for each in keys:
            keys_of_range = &plan.keys[plan.ranges]
            keys_of_range.first, keys_of_range.last, keys_of_range.step, keys_of_range.counted_from = each
            plan.ranges += 1
        self.names.append(name)
        self.stats.append(command_stats)
        self.indexes[name] = i
        return i

    cdef int add_reads_of_states(self, commands) except -1:
        """Add the commands that read states: `StateForwardSpec`s (see `command_routes`)."""
        cdef int i
        for name, least, most, keys, merge, special, stats in commands:
            i = self.add(name, least, most, keys, special, stats)
            self.plans[i].reads_states = True
            self.plans[i].join = ARRAY if merge is ReplyMerge.LIST else SUM if merge is ReplyMerge.SUM else NOT_JOINED
        return 0

    cdef int set_upstream_commands(self, commands) except -1:
        """Set the commands that are forwarded to the upstream (see `Forwarder.set_upstream`)."""
        cdef int i
        for i in range(self.specs.count):
            self.plans[i].is_for_upstream = False
        for name, is_read, publishes, keys, special, is_container, queued_arity, stats in commands:
            if name not in self.indexes:
                if self.specs.count == SPECS_MAX:
                    continue  # the general path answers it
                self.add(name, 1, WORDS_MAX, keys, special, stats, is_container)
            i = self.indexes[name]
            if self.plans[i].reads_states and not self.has_keys(&self.plans[i], keys):
                continue
            self.plans[i].is_for_upstream, self.plans[i].is_read, self.plans[i].publishes = True, is_read, publishes
            self.plans[i].queued_arity = queued_arity
        return 0

    cdef bint has_keys(self, const Plan* plan, keys) except -1:
        """Return whether the keys of a command's requests are in these ranges."""
        cdef int i
        rows = [(plan.keys[i].first, plan.keys[i].last, plan.keys[i].step, plan.keys[i].counted_from) for i in range(plan.ranges)]
        return rows == [tuple(each) for each in keys]

    cdef Py_ssize_t find_keys(self, const Plan* plan, const Word* words, size_t count, Word* keys) noexcept:
        """Find the keys of a request of `count` words; return their number; -1: the general path finds them."""
        cdef const KeyRange* part
        cdef int64_t first, last
        cdef size_t found = 0, number = 0
        cdef int i
        for i in range(plan.ranges):
            part = &plan.keys[i]
            first = part.first
            last = part.last + (first if part.last >= 0 else <int64_t>count)
            if part.counted_from:
                if first >= <int64_t>count or not number_in(&words[first], &number):
                    return -1
                first += part.counted_from
                last = first + (<int64_t>number - 1) * part.step
                if not number:
                    continue
            if first >= <int64_t>count or last >= <int64_t>count:
                return -1
            while first <= last:
                if found == WORDS_MAX:
                    return -1
                keys[found] = words[first]
                found += 1
                first += part.step
        return found

    cdef int collect(self) except -1:
        """Add the counts of requests to the commands' statistics."""
        cdef int i
        for i in range(self.specs.count):
            self.stats[i].calls += self.calls[i]
            self.calls[i] = 0
        return 0
