"""A client of replies that are made in steps."""

from __future__ import annotations

from resp_server.protocol.errors import ReplyError
from resp_server.protocol.replies import Sliced
from tests.unit.resp_server.conftest import Client


class SteppingClient(Client):
    """Answers what goes wrong in a step before anything is sent, as a connection does."""

    def drain(self, sliced: Sliced) -> bytes:
        try:
            return super().drain(sliced)
        except ReplyError as error:
            sliced.release()
            return self.pipeline.error_reply(error)
