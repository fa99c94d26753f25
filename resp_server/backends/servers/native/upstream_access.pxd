"""The layout of `upstream_access`' class."""

from resp_server.backends.servers.native.client_batch cimport BatchClient

cdef class UpstreamAccess:
    cdef object connect  # returns a client's connection to a database (see `Forwarder.set_upstream`); None: there is no upstream
    cdef object dedicated_clients  # mappings of the clients with dedicated connections; empty: no client keeps its connection
    cdef object connection  # of the client whose input is being forwarded; of a Redis Cluster, to all nodes
    cdef object node_table  # of these nodes; None: it is no Redis Cluster
    cdef bint is_open  # `connection` was asked for
    cdef int reset(self) except -1
    cdef bint open(self, sink, int protocol, database) except -1
    cdef object shared_connection(self, BatchClient client, int protocol)
