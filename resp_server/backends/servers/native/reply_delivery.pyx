# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""The end of a client's batch: its replies are sent, or the general path answers its requests, or it fails.

The keys of a client that tracks keys are noted when a state server's reply to them arrives, and recorded in the tracking
table before anything else runs (see `tracked_reads`). The keys of a transaction are read by EXEC, so they are noted with its reply.
"""

from resp_server.native.client_fields cimport record_reads
from resp_server.backends.servers.native.client_batch cimport BatchClient, ClientBatch

from resp_server.session.epochs import NO_EPOCHS


cdef class ReplyDelivery:
    """Sends clients the replies to their batches. Before anything else runs, it records the keys that a client may cache."""

    def __init__(self, server, command_stats):
        self.server, self.command_stats, self.noted = server, command_stats, []

    cdef int record_noted(self) except -1:
        """Record the noted keys. A reply that was requested before all keys were invalidated is followed by an invalidation."""
        cdef ClientBatch client_batch
        cdef list noted = self.noted
        if not noted:
            return 0
        self.noted = []
        tracking = self.server.tracking
        for client_batch in noted:
            keys, client_batch.noted = client_batch.noted, None
            try:
                if tracking.full_invalidations == client_batch.full_invalidations:
                    record_reads(tracking, client_batch.tracking, keys)
                else:
                    tracking.enqueue_resend(client_batch.tracking, keys)
            except Exception as error:
                self.server.report(error)
                self.server.clients.cut(client_batch.tracking.session_id, "its keys could not be recorded")
        return 0

    cdef int deliver(self, ClientBatch client_batch) except -1:
        """Send a client its replies; if one is from an earlier epoch than a reply before it, resend the requests."""
        self.record_noted()  # the client's next request may be answered now, from a later epoch
        client_batch.is_finished = True
        if client_batch.ends_at < client_batch.request_count:
            client_batch.request_count = client_batch.ends_at
            client_batch.sink.end(client_batch.joined_replies())
            return 0
        epochs = client_batch.last_epochs if len(client_batch.epoch_sets) == 1 else client_batch.epochs()
        if client_batch.has_older_reply():
            self.resend(client_batch, epochs)
        elif isinstance(client_batch.sink, BatchClient):
            (<BatchClient>client_batch.sink).send_replies(client_batch.joined_replies(), epochs)
        else:
            client_batch.sink.deliver(client_batch.joined_replies(), epochs)
        return 0

    cdef int resend(self, ClientBatch client_batch, epochs) except -1:
        """Have the general path resend a batch's requests; they were counted already."""
        cdef size_t i
        for i in range(client_batch.replied > 0, client_batch.request_count):
            self.command_stats[client_batch.requests[i].command].calls -= 1
        if client_batch.tracking is not None:
            client_batch.tracking.is_caching_set = client_batch.was_caching_set
        client_batch.sink.resend(client_batch.data, epochs)
        return 0

    cdef int restart(self, ClientBatch client_batch) except -1:
        """Drop a batch's replies, and have the general path resend its requests."""
        client_batch.is_finished = True
        try:
            self.resend(client_batch, NO_EPOCHS)
        except Exception as error:
            self.server.report(error)
        return 0

    cdef int fail(self, ClientBatch client_batch, error) except -1:
        """Handle an exception: fail a batch of one request, or resend several, because the exception may concern only one."""
        client_batch.is_finished = True
        try:
            if client_batch.has_writes:
                self.server.report(error)
                client_batch.sink.end(b"")
            elif client_batch.request_count == 1:
                client_batch.sink.fail(error)
            else:
                self.server.report(error)
                self.resend(client_batch, NO_EPOCHS)
        except Exception as another:
            self.server.report(another)
        return 0
