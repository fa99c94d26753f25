# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The jobs of a server's view, their stores' pages, and the slots that the server has."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcmp

from resp_server.native.wire cimport Word

from state_backend.model.errors import StoreError


cdef class JobPages:
    """A job's LMDB pages, refreshed once per buffer."""

    def __init__(self, name):
        self.name = name
        self.prefix = name.encode()
        self.renewal = self.watch_renewal = 0
        self.first_layer = self.newest = self.next = NO_JOB


cdef class Jobs:
    """The jobs of the current view. watch_point: returns the lineage and the epoch of a job's store, in the view."""

    def __cinit__(self, watch_point):
        self.view, self.pages, self.job_by_prefix, self.only_job = None, [], {}, NO_JOB
        self.watch_point = watch_point

    cdef bint use_view(self, view, bint is_node) except -1:
        """Read the view's current jobs and slots; return whether they, or their epochs, may have changed.

        is_node: the server is a node of a cluster.
        """
        cdef uint64_t renewal = view.renewals, routes_version = view.routes_version
        cdef bint has_new_routes = view is not self.view or self.routes_version != routes_version
        cdef bint is_changed = has_new_routes or self.renewal != renewal
        self.is_node, self.now, self.renewal = is_node, view.now_ms, renewal
        self.now_ms = self.now
        if is_changed:
            self.has_all_listed = False
        if has_new_routes:
            self.view, self.routes_version = view, routes_version
            self.pages = [JobPages(name) for name in view.job_names()]
            self.job_by_prefix = {(<JobPages>each).prefix: i for i, each in enumerate(self.pages)}
            for job in list(self.pages):
                if view.has_fresh((<JobPages>job).name):
                    (<JobPages>job).first_layer = <int>len(self.pages)
                    self.pages += [JobPages((<JobPages>job).name), JobPages((<JobPages>job).name)]
            self.only_job, self.last_job = 0 if view.has_single_job else NO_JOB, 0
            self.owned_slots_object, self.owned_slots = view.served_slots, NULL
            if self.owned_slots_object is not None:
                self.owned_slots = <const uint8_t*>PyBytes_AS_STRING(self.owned_slots_object)
        return is_changed

    cdef bint is_newest(self):
        """Return whether the view, renewed last for `use_view`, is at the newest epochs of the jobs that were read since."""
        cdef JobPages job
        if self.view is None or self.renewal != <uint64_t>self.view.renewals:
            return False
        for job in self.pages:
            if job.renewal == self.renewal and not (job.is_readable and job.pages.is_newest()):
                return False
        return True

    cdef int job_at(self, const Word* key) except -3:
        """Return the index of a key's job, NO_JOB, or UNDECIDED: the general path has to find the job."""
        if self.only_job >= 0:
            return self.only_job
        if self.last_job < len(self.pages) and self.is_named(self.last_job, key):
            return self.last_job
        try:
            name = self.view.job_of(PyBytes_FromStringAndSize(<const char*>key.at, key.size))
        except StoreError:
            return UNDECIDED
        if name is None:
            return NO_JOB
        self.last_job = self.job_by_prefix[(<str>name).encode()]
        return self.last_job

    cdef bint is_named(self, int index, const Word* key) noexcept:
        """Return whether a key begins with the name of a job and a colon: then it is the key of no other job."""
        cdef bytes prefix
        cdef size_t size
        if index < 0:
            return False
        prefix = (<JobPages>self.pages[index]).prefix
        size = PyBytes_GET_SIZE(prefix)
        return key.size > size and key.at[size] == c":" and memcmp(PyBytes_AS_STRING(prefix), key.at, size) == 0

    cdef bint refresh_job(self, int index) except -1:
        """Move a job to its newest epoch, once per buffer; False if its pages cannot be read."""
        cdef JobPages job = <JobPages>self.pages[index]
        if job.renewal == self.renewal:
            if job.is_readable and job.read_ms != self.now_ms:
                job.read_ms, job.now_ms = self.now_ms, self.view.snapshot_of(job.name).clock_at(self.now_ms)
            return job.is_readable
        try:
            snapshot = self.view.snapshot_of(job.name)
        except StoreError:
            return False
        job.pages, job.read_ms = snapshot.pages, self.now_ms
        job.is_readable = job.pages is not None
        job.missing_slots = self.view.slots_missing(job.name)
        if job.is_readable:
            job.now_ms = snapshot.clock_at(self.now_ms)
            if job.first_layer != NO_JOB:
                job.is_readable = self.refresh_layers(job, index)
        job.renewal = self.renewal
        return job.is_readable

    cdef bint refresh_layers(self, JobPages job, int index) except -1:
        """Find the layers that reads of a job ask first; False if their pages cannot be read."""
        cdef JobPages layer
        cdef int at = job.first_layer
        job.newest = NO_JOB
        for snapshot in reversed(self.view.fresh_snapshots(job.name)):
            layer = <JobPages>self.pages[at]
            layer.pages, layer.next = snapshot.pages, index if job.newest == NO_JOB else job.newest
            if layer.pages is None:
                return False
            job.newest, at = at, at + 1
        return True

    cdef bint is_listed(self):
        """Return whether all jobs are there, so that their keys can be listed."""
        if not self.has_all_listed:
            try:
                self.view.check_all_listed()
            except StoreError:
                return False
            self.has_all_listed = True
        return True

    cdef tuple watch_point_of(self, JobPages job):
        """Return the lineage and the epoch of a job's store in the view."""
        if job.watch_renewal != self.renewal:
            job.watch_point, job.watch_renewal = self.watch_point(job.name), self.renewal
        return job.watch_point
