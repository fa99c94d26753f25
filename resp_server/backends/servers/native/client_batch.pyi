"""The types of `client_batch.pyx`: the client of a batch of requests."""

from typing import Protocol

from resp_server.native.client_fields import InputInterceptor
from resp_server.raw_replies.raw_reply import RawReplySender
from resp_server.session.epochs import Epochs, ReplyEpochs

class ForwarderSink(Protocol):
    """The client of a batch of requests. Its methods do not raise: replies of other clients come next."""

    @property
    def seen(self) -> Epochs:
        """The epochs that the client has seen; its replies must not be from earlier ones."""

    @property
    def watches_states(self) -> bool:
        """Whether the client watches states' keys, so that EXEC takes the general path."""

    def deliver(self, reply: bytes | RawReplySender, epochs: ReplyEpochs) -> None:
        """Take the replies to all requests, in order, and their epochs."""

    def resend(self, data: bytes, epochs: ReplyEpochs) -> None:
        """Have the general path resend the requests: a reply was from an earlier epoch than the reply before it."""

    def fail(self, error: Exception) -> None:
        """Take an exception in place of the replies."""

class UpstreamForwarderSink(ForwarderSink, Protocol):
    """The client of a batch with requests for the upstream."""

    @property
    def client_id(self) -> int:
        """The id of the client."""

    def error_reply(self, error: Exception) -> bytes:
        """Return the error reply for an exception."""

    def end(self, replies: bytes | RawReplySender) -> None:
        """Take the last replies, and close the client's connection: a request to the upstream may have run, or not."""

class BatchClient(InputInterceptor):
    client_id: int
