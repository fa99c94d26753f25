# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""What compiled modules know of a client: fields of its session and of its connection, and how its reads are recorded."""

from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport uint8_t

cdef extern from "Python.h":
    void PyObject_GC_UnTrack(void *)
    Py_ssize_t PyTuple_GET_SIZE(object)
    PyObject* PyTuple_GET_ITEM(object, Py_ssize_t)


cdef class SessionFields:
    """The fields of a session that compiled modules use with each request (`session.Session` has the others)."""


cdef class ConnectionFields:
    """The fields of a connection that its transport reads with each request (`client.Connection` has the others)."""


cdef class InputInterceptor:
    """Processes a socket's input before its protocol does, without making Python objects."""

    cdef size_t intercept(self, const uint8_t* data, size_t size) except? 0:
        """Process input from the front; return the number of processed bytes."""
        return 0


cdef inline bint is_client_of(tuple clients, PyObject* client) noexcept:
    """Return whether a client is one of those that cache a key; none: all are."""
    cdef Py_ssize_t i, count = PyTuple_GET_SIZE(clients)
    for i in range(count):
        if PyTuple_GET_ITEM(clients, i) == client:
            return True
    return count == 0


cdef int record_reads(tracking, tracking_state, list keys) except -1:
    """Record in the tracking table that a client read keys, except those that it is recorded for already: most of them."""
    cdef list new = []
    cdef dict clients_by_key = tracking.clients_by_key
    cdef PyObject* clients
    for key in keys:
        clients = PyDict_GetItem(clients_by_key, key)
        if clients == NULL or not is_client_of(<tuple>clients, <PyObject*>tracking_state):
            new.append(key)
    if new:
        tracking.record_keys(tracking_state, new)
    return 0


def untrack(words):
    """Have the garbage collector skip a list of words: each of its visits to a million words takes some 10 ms.

    Only for a list that never is part of a cycle. It is freed as any other list, with its last reference.
    """
    PyObject_GC_UnTrack(<void *>words)
