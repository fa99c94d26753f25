"""The search for keys of new formats at an upstream."""

from __future__ import annotations

import asyncio

import pytest

from compat.waiting import eventually_async
from resp_server.backends.overlay.key_conflict_scan import COUNT, STEPS_MAX, KeyConflictScans
from resp_server.backends.routing.ownership import NewFormat, Ownership
from resp_server.protocol.replies import encode
from resp_server.raw_replies.reply_sinks import ReplySink
from resp_server.raw_replies.reply_splitter import pack

FORMATS = {"new": {"sum": "sum:<day>", "mean": "mean:<day>"}}


class Nodes:
    """Nodes of an upstream with pages of keys. The replies come when the test takes them."""

    def __init__(self, *pages: list[list[bytes]]) -> None:
        self.pages = pages
        self.node_count = len(pages)
        self.sent: list[tuple[int, bytes, ReplySink]] = []
        self.steps = 0

    def send_to_node(self, node: int, client: int, protocol: int, packed: bytes, sink: ReplySink, index: int) -> None:
        self.sent.append((node, packed, sink))

    def answer(self) -> None:
        """Answer the requests until there are none."""
        while self.sent:
            node, packed, sink = self.sent.pop(0)
            self.steps += 1
            at = next(at for at in range(10_000) if b"\r\n%d\r\n$5\r\nMATCH" % at in packed)
            is_last = at + 1 >= len(self.pages[node])
            sink.put(0, encode([b"%d" % (0 if is_last else at + 1), self.pages[node][at]], 2))


def checked(nodes: Nodes) -> Ownership:
    ownership = Ownership()
    ownership.complete()
    ownership.on_new = KeyConflictScans(ownership, nodes, lambda then: then()).add
    ownership.learn(FORMATS)
    nodes.answer()
    return ownership


def test_formats_without_keys_at_any_node_are_owned_after_whole_scan() -> None:
    nodes = Nodes([[b"a"], [], [b"summary:1"]], [[], [b"b"]])
    ownership = checked(nodes)
    assert ownership.owner_of(b"sum:1") == "new:sum" and ownership.owner_of(b"mean:1") == "new:mean"
    assert nodes.steps == 2 * 5


def test_one_key_at_last_node_makes_its_format_wait_and_no_other() -> None:
    ownership = checked(Nodes([[b"a"]], [[], [b"mean:1"]]))
    assert ownership.owner_of(b"sum:1") == "new:sum" and ownership.owner_of(b"mean:1") is None
    (row,) = [row for row in ownership.jobs() if row.status == "waiting"]
    assert row.formats == ["mean:<day>"] and row.examples == [b"mean:1"]


def test_search_ends_after_bounded_number_of_steps() -> None:
    nodes = Nodes([[] for _ in range(3 * STEPS_MAX)])
    assert checked(nodes).owner_of(b"sum:1") == "new:sum"
    assert nodes.steps == 2 * STEPS_MAX


def test_search_requests_keys_of_format_only() -> None:
    nodes = Nodes([[]])
    ownership = Ownership()
    KeyConflictScans(ownership, nodes, lambda then: then()).add([NewFormat("j", "s", "a*[<x>]")])
    assert nodes.sent[0][1] == pack((b"SCAN", b"0", b"MATCH", rb"a\*\[*\]", b"COUNT", b"%d" % COUNT))


@pytest.mark.parametrize("reply", [b"-NOPERM no\r\n", b"+OK\r\n", b"*1\r\n:1\r\n"])
def test_after_error_search_is_repeated_and_keys_stay_upstreams(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resp_server.backends.overlay.key_conflict_scan.RETRY_S", 0)

    async def run() -> None:
        nodes = Nodes([[]])
        ownership = Ownership()
        ownership.complete()
        ownership.on_new = KeyConflictScans(ownership, nodes, lambda then: then()).add
        ownership.learn(FORMATS)
        nodes.sent.pop()[2].put(0, reply)
        assert not nodes.sent and ownership.owner_of(b"sum:1") is None
        await eventually_async(lambda: nodes.sent, interval_s=0)
        nodes.sent.pop()[2].fail(0, ConnectionError("it is down"))
        await eventually_async(lambda: nodes.sent, interval_s=0)
        nodes.answer()
        assert ownership.owner_of(b"sum:1") == "new:sum"

    asyncio.run(run())
