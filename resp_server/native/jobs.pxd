"""The layout of `jobs`' classes."""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint64_t

from resp_server.native.wire cimport Word
from state_backend.native.lookup cimport Pages

# A key's job, if it is not the index of one.
cdef enum:
    NO_JOB = -1
    UNDECIDED = -2

cdef class JobPages:
    cdef object name
    cdef bytes prefix
    cdef Pages pages
    cdef bint is_readable
    cdef uint64_t renewal  # the view's renewal for which the pages were refreshed
    cdef int64_t now_ms  # at least the epoch's clock, for the clock reading `read_ms`
    cdef int64_t read_ms
    cdef object missing_slots  # slots that the store lacks; None: none
    cdef tuple watch_point  # the lineage and the epoch of its store at the renewal `watch_renewal`
    cdef uint64_t watch_renewal
    cdef int first_layer  # of a job that may have fresh values: the first of its two layers; NO_JOB: it has none
    cdef int newest  # of a job: the layer that reads ask first; NO_JOB: none has values that are not settled
    cdef int next  # of a layer: the layer or job that reads ask for keys that it does not have

@cython.final  # calls of its own methods need no table
cdef class Jobs:
    cdef object view, watch_point
    cdef uint64_t routes_version, renewal
    cdef object now  # the view's clock reading in milliseconds
    cdef int64_t now_ms  # the same, or after STATE AT the clock reading of a transaction
    cdef list pages  # the `JobPages` of each job, then those of layers of fresh values, a newer one after an older one
    cdef dict job_by_prefix
    cdef int only_job  # NO_JOB: there are several, or none
    cdef int last_job  # the job of the last key
    cdef const uint8_t* owned_slots  # one byte per slot; NULL: all slots
    cdef object owned_slots_object
    cdef bint is_node
    cdef bint has_all_listed  # no job of the view has keys that cannot be listed
    cdef bint use_view(self, view, bint is_node) except -1
    cdef bint is_newest(self)
    cdef int job_at(self, const Word* key) except -3
    cdef bint is_named(self, int index, const Word* key) noexcept
    cdef bint refresh_job(self, int index) except -1
    cdef bint refresh_layers(self, JobPages job, int index) except -1
    cdef bint is_listed(self)
    cdef tuple watch_point_of(self, JobPages job)
