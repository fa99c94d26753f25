"""How requests are split over the nodes of a Redis Cluster, and replies joined."""

from __future__ import annotations

import pytest

from resp_server.backends.redis.cluster_requests import Plan, least_of, name_at, plan_of
from resp_server.backends.redis.slot_table import SlotTable
from resp_server.backends.redis.url import UpstreamAddress
from resp_server.backends.routing.ownership import Ownership
from resp_server.backends.routing.router import Router
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.commands import command_table
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.raw_reply import RawReply, Steps, as_bytes, result_of
from state_backend.model.slots import SLOTS, slot_of

ROUTER = Router(command_table(), Ownership())
A, B, C = slot_of(b"a"), slot_of(b"b"), slot_of(b"c")


def routed_of(request: Request) -> OverlayCommand:
    found = ROUTER.commands.of(request)
    assert found is not None
    return found


def run(steps: object) -> object:
    def whole() -> Steps[object]:
        return (yield from result_of(steps))  # type: ignore[arg-type]

    generator = whole()
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value


def plan(line: str) -> Plan:
    request = tuple(line.encode().split(b" "))
    found = run(plan_of(routed_of(request), request))
    assert isinstance(found, Plan)
    return found


def merged(found: Plan, *replies: bytes) -> bytes:
    reply = run(found.merge(replies))
    assert isinstance(reply, bytes)
    return as_bytes(reply)


@pytest.mark.parametrize(
    "line", ["GET a", "SET a 1", "MGET a a", "MSET {a}x 1 {a}y 2", "SINTER a b", "EVAL x 1 a", "DEL a"]
)
def test_request_of_one_slot_or_without_split_is_sent_whole(line: str) -> None:
    (part,) = plan(line).parts
    assert b" ".join(part.request).decode() == line and part.slot == A


def test_reads_are_split_and_joined_in_order_of_keys() -> None:
    found = plan("MGET a b a c b")
    assert [(part.slot, tuple(part.request[1:])) for part in found.parts] == [
        (A, (b"a", b"a")),
        (B, (b"b", b"b")),
        (C, (b"c",)),
    ]
    replies = (b"*2\r\n:1\r\n:3\r\n", b"*2\r\n:2\r\n:5\r\n", b"*1\r\n:4\r\n")
    assert merged(found, *replies) == b"*5\r\n:1\r\n:2\r\n:3\r\n:4\r\n:5\r\n"


@pytest.mark.parametrize("name", ["EXISTS", "DEL", "UNLINK", "TOUCH"])
def test_counts_are_summed(name: str) -> None:
    assert merged(plan(f"{name} a b c"), b":1\r\n", b":0\r\n", b":3\r\n") == b":4\r\n"


def test_values_stay_with_their_keys() -> None:
    found = plan("MSET a 1 b 2 a 3")
    assert [b" ".join(part.request) for part in found.parts] == [b"MSET a 1 a 3", b"MSET b 2"]
    assert merged(found, b"+OK\r\n", b"+OK\r\n") == b"+OK\r\n"


@pytest.mark.parametrize("line", ["FLUSHALL", "SCRIPT LOAD x", "SCRIPT FLUSH", "FUNCTION LOAD x", "SCRIPT EXISTS x y"])
def test_commands_for_every_master_are_sent_to_all(line: str) -> None:
    assert plan(line).on_all_masters


@pytest.mark.parametrize(
    "line", ["PUBLISH c x", "TIME", "INFO", "EVAL x 0", "COMMAND", "FUNCTION STATS", "CONFIG GET x"]
)
def test_other_requests_without_keys_are_sent_to_one_node(line: str) -> None:
    found = plan(line)
    assert not found.on_all_masters and [part.slot for part in found.parts] == [None]


def test_script_exists_if_every_master_has_it() -> None:
    found = plan("SCRIPT EXISTS x y z")
    assert merged(found, b"*3\r\n:1\r\n:1\r\n:0\r\n", b"*3\r\n:1\r\n:0\r\n:0\r\n") == b"*3\r\n:1\r\n:0\r\n:0\r\n"


def test_one_master_that_kills_its_script_is_enough() -> None:
    found = plan("SCRIPT KILL")
    replies: list[RawReply] = [b"-NOTBUSY none\r\n", b"+OK\r\n"]
    assert found.takes_errors and merged(found, *replies) == b"+OK\r\n"  # type: ignore[arg-type]


def test_least_of_several_masters_is_reply_to_wait() -> None:
    assert least_of([b":2\r\n", b":1\r\n", b":3\r\n"]) == b":1\r\n"
    assert least_of([b"*2\r\n:1\r\n:2\r\n", b"*2\r\n:0\r\n:3\r\n"]) == b"*2\r\n:0\r\n:2\r\n"


def test_name_of_masters_slot_is_found() -> None:
    one, other = UpstreamAddress("a", 1), UpstreamAddress("b", 1)
    table = SlotTable([one] * (SLOTS - 8) + [other] * 8)
    for master in (one, other):
        assert table.master_of(slot_of(name_at(table, master))) == master
