# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Requests whose keys are looked up together: first the keys, then members and fields that have records of their own."""

from cpython.time cimport monotonic_ns
from libc.stdint cimport uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free

from resp_server.native.jobs cimport NO_JOB, UNDECIDED, JobPages, Jobs
from resp_server.native.records cimport LIVE, Record, name_member
from resp_server.native.rows cimport LARGE_FORMS, MEMBERS, RANKS_OF, REVERSED_RANKS_OF, TWO_MEMBERS, WATCHED, rows
from resp_server.native.trees cimport rank_in_tree
from resp_server.native.wire cimport Word
from state_backend.native.little_endian cimport f64, u64
from state_backend.native.lookup cimport MISSING, Lookup, Pages, crc32_of, slot_of


cdef class LookupBatch:
    """Requests that were cut, and the look-ups of their keys. What answers them reads both."""

    def __cinit__(self, Jobs jobs):
        self.jobs, self.random = jobs, <uint64_t>monotonic_ns() | 1

    def __dealloc__(self):
        free(self.scratch.data)

    cdef int clear(self) noexcept:
        self.word_count = self.request_count = self.lookup_count = 0
        return 0

    cdef bint prepare_lookups(self, Request* request) except -1:
        """Prepare the look-ups of a request's keys; False if the general path has to answer."""
        cdef size_t i
        cdef Word* key
        cdef Lookup* lookup
        cdef uint16_t slot, first_slot = 0
        cdef int job
        for i in range(request.keys):
            key = &self.words[request.first_word + i]
            slot = slot_of(key.at, key.size)
            if i == 0:
                first_slot = slot
            if self.jobs.is_node and slot != first_slot and not rows[request.command].has_any_slots:
                return False
            if self.jobs.owned_slots != NULL and not self.jobs.owned_slots[slot]:
                return False
            job = self.jobs.only_job if self.jobs.only_job >= 0 else self.jobs.job_at(key)
            if job == UNDECIDED:
                return False
            lookup = &self.lookups[self.lookup_count + i]
            lookup.high = (<uint64_t>slot << 32 | crc32_of(key.at, key.size)) << 16
            lookup.low, lookup.bytes_, lookup.outcome = 0, 6, MISSING
            self.job_of[self.lookup_count + i] = job
            self.clock_of[self.lookup_count + i] = self.jobs.now_ms
            if job >= 0:
                if not self.jobs.refresh_job(job):
                    return False
                self.clock_of[self.lookup_count + i] = (<JobPages>self.jobs.pages[job]).now_ms
                missing_slots = (<JobPages>self.jobs.pages[job]).missing_slots
                if missing_slots is not None and slot in missing_slots:
                    return False
                if (<JobPages>self.jobs.pages[job]).newest != NO_JOB and self.reads_fresh and rows[request.command].reply != WATCHED:
                    self.job_of[self.lookup_count + i] = (<JobPages>self.jobs.pages[job]).newest
        self.lookup_count += request.keys
        return True

    cdef int find_all(self) except -1:
        """Look up the keys of all requests, then members of large collections, then ranks of these members."""
        cdef size_t keys = self.lookup_count
        find_in_jobs(self, 0, keys, False)
        prepare_member_lookups(self)
        if self.lookup_count > keys:
            find_in_jobs(self, keys, self.lookup_count, True)
            find_ranks(self)
        return 0


cdef int find_in_jobs(LookupBatch batch, size_t first, size_t end, bint is_of_members) except -1:
    cdef size_t i, count, done = 0
    cdef int job, next_job
    cdef Pages pages
    for job in range(<int>len(batch.jobs.pages) - 1, -1, -1):  # layers of fresh values before their jobs
        if done == end - first:
            break
        count = 0
        for i in range(first, end):
            if batch.job_of[i] == job:
                batch.job_lookups[count] = &batch.lookups[i]
                count += 1
        if count:
            pages = (<JobPages>batch.jobs.pages[job]).pages
            pages.moment_ms = batch.monotonic_ms
            pages.find(&pages.fields if is_of_members else &pages.keys, batch.job_lookups, count)
            next_job = (<JobPages>batch.jobs.pages[job]).next
            if next_job != NO_JOB and not is_of_members:
                for i in range(first, end):
                    if batch.job_of[i] == job and batch.lookups[i].outcome == MISSING:
                        batch.job_of[i] = next_job
                        count -= 1
        done += count
    return 0


cdef int prepare_member_lookups(LookupBatch batch) except -1:
    """Prepare look-ups of members and fields that have records of their own."""
    cdef size_t i, j
    cdef Request* request
    cdef Record record
    cdef Word* member
    cdef int form, first
    for i in range(batch.request_count):
        request = &batch.requests[i]
        if rows[request.command].reads not in (MEMBERS, TWO_MEMBERS):
            continue
        form = LARGE_FORMS[rows[request.command].kind]
        if read(batch, request.first_lookup, &batch.words[request.first_word], &record) != LIVE:
            continue
        first = rows[request.command].first_member
        if record.form != form or record.size < 24 or request.words - first > LOOKUPS_MAX - batch.lookup_count:
            continue
        request.first_member, request.members = <uint32_t>batch.lookup_count, request.words - first
        request.rank = -1
        for j in range(request.members):
            member = &batch.words[request.first_word + first + j]
            name_member(&record, member, &batch.lookups[batch.lookup_count])
            batch.job_of[batch.lookup_count] = batch.job_of[request.first_lookup]
            batch.clock_of[batch.lookup_count] = batch.clock_of[request.first_lookup]
            batch.lookup_count += 1
    return 0


cdef int find_ranks(LookupBatch batch) except -1:
    """Compute the requested ranks of members in large sorted sets."""
    cdef size_t i
    cdef Request* request
    cdef Record key, member
    cdef Word* word
    for i in range(batch.request_count):
        request = &batch.requests[i]
        if request.members and rows[request.command].reply in (RANKS_OF, REVERSED_RANKS_OF):
            word = &batch.words[request.first_word + 1]
            read(batch, request.first_lookup, &batch.words[request.first_word], &key)
            if read(batch, request.first_member, word, &member) == LIVE and member.size == 8:
                request.rank = rank_in_tree(
                    pages_of(batch, request), u64(key.payload), f64(member.payload), word
                )
    return 0
