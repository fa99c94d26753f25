"""WATCH as the core answers it: a key's mark is its record (see `pipeline.watch`), and EXEC runs if no epoch came since.

The general path compares the marks of all other transactions, and makes those of long values and of keys of no job.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from libc.stdint cimport int64_t, uint8_t
from resp_server.native.core cimport Core, JobPages, Request
from resp_server.native.records cimport ANSWERED, GENERAL, LARGE_MAP, LIVE, SMALL_SORTED_SET, Record
from resp_server.native.wire cimport Word, put
from state_backend.native.little_endian cimport u64
from state_backend.native.lookup cimport EXPIRY_AT

cdef enum:
    KEYS_MAX = 128  # of a client
    RECORD_BYTES_MAX = 65536


cdef inline tuple watch_point_of(Core core, JobPages job):
    """Return the lineage and the epoch of a job's store in the view."""
    if job.watch_renewal != core.renewal:
        job.watch_point, job.watch_renewal = core.watch_point(job.name), core.renewal
    return job.watch_point


cdef inline int watch_keys(Core core, Request* request) except -2:
    """Record marks of keys for the client, but for those that it watches already."""
    cdef const Word* word
    cdef Record record
    cdef size_t i, index
    cdef int found
    cdef dict marks = {}, watched = core.session.watched
    if core.read_ms or len(watched) + request.keys > KEYS_MAX:
        return GENERAL
    for i in range(request.keys):
        word, index = &core.words[request.first_word + i], request.first_lookup + i
        found = core.read_key(index, word, &record)
        if found == GENERAL or core.job_of[index] < 0:
            return GENERAL
        name = 0, PyBytes_FromStringAndSize(<const char*>word.at, word.size)
        if name in watched:
            continue
        lineage, epoch = watch_point_of(core, <JobPages>core.jobs[core.job_of[index]])
        if found != LIVE:
            marks[name] = lineage, epoch, "", True
            continue
        if core.lookups[index].size > RECORD_BYTES_MAX or (record.form == LARGE_MAP and u64(record.payload + 24)):
            return GENERAL  # or fields expire
        digest = PyBytes_FromStringAndSize(<const char*>core.lookups[index].record, core.lookups[index].size)
        marks[name] = lineage, epoch, digest, record.form <= SMALL_SORTED_SET
    watched.update(marks)
    return put(core.out, b"+OK\r\n", 5) + ANSWERED


cdef inline bint is_unchanged(Core core) except -1:
    """Return whether none of the client's watched keys has changed; False: the general path has to find out."""
    cdef JobPages job
    cdef bytes record
    cdef Word word
    cdef int index
    cdef int64_t expire_at_ms
    for (db, key), mark in (<dict>core.session.watched).items():
        if db or type(mark) is not tuple:  # the general path made it
            return False
        word.at, word.size = <const uint8_t*>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)
        index = core.job_at(&word)
        if index < 0 or not core.refresh_job(index):
            return False
        job = <JobPages>core.jobs[index]
        if watch_point_of(core, job) != (mark[0], mark[1]):
            return False
        if mark[2]:
            record = mark[2]
            expire_at_ms = <int64_t>u64(<const uint8_t*>PyBytes_AS_STRING(record) + EXPIRY_AT)
            if 0 < expire_at_ms <= job.now_ms:
                return False
    return True
