"""What stands in a client's connection while the forwarder sends its replies."""

from __future__ import annotations

import asyncio

from resp_server.protocol.replies import Pending


class ForwarderReplies(Pending):
    """Stands for replies that the forwarder sends (see `ClientForwarder.delegate`)."""

    def __init__(self) -> None:
        super().__init__(0.0, lambda: None)


class NoScheduledTurn(asyncio.Handle):
    """Stands for the next turn while the forwarder sends the replies; there is nothing to cancel."""

    def __init__(self) -> None:
        pass

    def cancel(self) -> None:
        pass


FORWARDER_REPLIES, NO_SCHEDULED_TURN = ForwarderReplies(), NoScheduledTurn()
