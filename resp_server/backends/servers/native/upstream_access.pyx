# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The connection to the upstream of the client whose input is being forwarded. It is looked up when a request needs it."""

from resp_server.backends.servers.native.client_batch cimport BatchClient


cdef class UpstreamAccess:
    """Finds a client's connection to the upstream."""

    cdef int reset(self) except -1:
        """Begin with another client's input."""
        self.connection, self.node_table, self.is_open = None, None, False
        return 0

    cdef bint open(self, sink, int protocol, database) except -1:
        """Find the client's connection to the upstream; False: the general path gets its requests."""
        if not self.is_open:
            self.is_open = True
            if isinstance(sink, BatchClient) and not database and self.dedicated_clients:
                self.connection = self.shared_connection(sink, protocol)
                return self.connection is not None
            self.connection = self.connect(sink.client_id, protocol, database)
            self.node_table = None if self.connection is None else self.connection.node_numbers
        return self.connection is not None

    cdef object shared_connection(self, BatchClient client, int protocol):
        """Return the client's connection to database 0 of a single upstream; None: the general path gets its requests."""
        for clients in self.dedicated_clients:
            if client.client_id in clients:
                return self.connect(client.client_id, protocol, 0)
        if client.shared is None or client.shared_protocol != protocol:
            client.shared, client.shared_protocol = self.connect(client.client_id, protocol, 0), protocol
        return client.shared
