"""What stands in a client's connection while the forwarder sends its replies."""

from __future__ import annotations

import asyncio

from resp_server.protocol.replies import Pending


class DelegatedReplies(Pending):
    """Stands for replies that the forwarder sends (see `ClientForwarder.delegate`)."""

    def __init__(self) -> None:
        super().__init__(0.0, lambda: None)


class NoTurn(asyncio.Handle):
    """Stands for the next turn while the forwarder sends the replies; there is nothing to cancel."""

    def __init__(self) -> None:
        pass

    def cancel(self) -> None:
        pass


DELEGATED_REPLIES, NO_TURN = DelegatedReplies(), NoTurn()
