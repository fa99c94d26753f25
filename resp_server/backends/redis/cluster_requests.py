"""Splits requests over the nodes of a Redis Cluster, and merges the nodes' replies. Pure.

The commands that clients of a Redis Cluster split are split here. Other commands go whole to the master of their first
key; if their keys are in several slots, that node replies CROSSSLOT. Commands without keys go where their tips say.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from resp_server.backends.redis.slot_table import SlotTable
from resp_server.backends.redis.url import UpstreamAddress
from resp_server.command.keys import key_runs
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.command.policy import ReplyMerge, Split
from resp_server.protocol.errors import GenericError
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.raw_reply import RawReply, Steps, as_bytes, is_error
from resp_server.raw_replies.reply_sinks import Merge
from resp_server.raw_replies.reply_splitter import array_in_order, items_of, sum_of_replies
from state_backend.model.slots import slot_of


def first_of(replies: Sequence[RawReply]) -> RawReply:
    """Return the first reply: all are equal."""
    return replies[0]


def all_true(replies: Sequence[RawReply]) -> Steps[RawReply]:
    """Return, for each item of arrays of 0 and 1, whether it is 1 in all of them."""
    found: list[bytes] = []
    for reply in replies:
        items = list(map(as_bytes, (yield from items_of(reply))))
        found = list(map(min, found, items)) if found else items
    return b"*%d\r\n" % len(found) + b"".join(found)


# Tips of commands that every master has to run, and how their replies are merged.
ALL_MASTERS = frozenset(["request_policy:all_shards", "request_policy:all_nodes"])
JOINS: dict[str, Merge] = {
    "response_policy:all_succeeded": first_of,
    "response_policy:agg_sum": sum_of_replies,
    "response_policy:agg_logical_and": all_true,
}
# One success is enough: other nodes may have nothing to do, as with SCRIPT KILL.
ONE_SUCCEEDED = "response_policy:one_succeeded"
NUMBER = re.compile(rb":(-?\d+)\r\n")
# Names to try for a slot of a master: it may have few of them (guess: finds one slot in most cases).
NAMES_MAX = 1 << 17
# Keys of a request that are hashed in one step (guess: 0.2 ms).
KEYS_AT_ONCE = 128


def one_success(replies: Sequence[RawReply]) -> RawReply:
    """Return the first reply that is no error, if there is one."""
    return next((reply for reply in replies if not is_error(reply)), replies[0])


def least_of(replies: Sequence[RawReply]) -> RawReply:
    """Return the least number of several replies, or of each place of several arrays."""
    rows = [[int(number) for number in NUMBER.findall(as_bytes(reply))] for reply in replies]
    least = [b":%d\r\n" % min(numbers) for numbers in zip(*rows, strict=True)]
    head = b"*%d\r\n" % len(least) if as_bytes(replies[0])[:1] == b"*" else b""
    return head + b"".join(least)


def name_at(table: SlotTable, master: UpstreamAddress) -> bytes:
    """Return the name of a key whose slot a master has; GenericError if that is not found."""
    for number in range(NAMES_MAX):
        name = b"sparkis:wait:%d" % number
        if table.master_of(slot_of(name)) == master:
            return name
    raise GenericError(f"no slot of the upstream's node {master} was found for WAIT; move more slots to it")


class Part(NamedTuple):
    """A part of a request.

    Args:
        slot: The slot of its keys; None: it has none.
    """

    slot: int | None
    request: Request


class Plan(NamedTuple):
    """How to run a request: the requests to single nodes, or one to all masters, and how their replies are merged.

    Args:
        takes_errors: Errors are merged, too; else the first error is the reply.
    """

    parts: list[Part]
    merge: Merge = first_of
    on_all_masters: bool = False
    takes_errors: bool = False


def plan_of(routed: OverlayCommand, request: Request) -> Plan | Steps[Plan]:
    """Return the plan of a request; in steps if it has to be split."""
    if routed.single_key_at and routed.single_key_at < len(request):
        return Plan([Part(slot_of(request[routed.single_key_at]), request)])
    runs = key_runs(routed.facts, request) or ()
    positions = next((positions for positions, _ in runs if positions), ())
    if not positions:
        return _without_keys(routed, request)
    split = routed.policy.split
    if split is None or not split.is_by_slot or len(runs) > 1 or len(positions) == 1:
        return Plan([Part(slot_of(request[positions[0]]), request)])
    if len(request) != 1 + split.item_size * len(positions):
        return Plan([Part(slot_of(request[positions[0]]), request)])
    return _split(split, request, positions)


def first_slot(routed: OverlayCommand, request: Request) -> int | None:
    """Return the slot of a request's first key; None: it has no keys."""
    runs = key_runs(routed.facts, request) or ()
    return next((slot_of(request[positions[0]]) for positions, _ in runs if positions), None)


def _split(split: Split, request: Request, positions: Sequence[int]) -> Steps[Plan]:
    places: dict[int, array[int]] = {}  # no lists: to free a million numbers would take too long
    for place, at in enumerate(positions):
        slot = slot_of(request[at])
        if slot not in places:
            places[slot] = array("L")
        places[slot].append(place)
        if not place % KEYS_AT_ONCE:
            yield
    if len(places) == 1:
        return Plan([Part(next(iter(places)), request)])
    parts: list[Part] = []
    for slot, some in places.items():
        arguments = [request[0]]
        for number, place in enumerate(some, len(parts)):
            arguments += request[positions[place] : positions[place] + split.item_size]
            if not number % KEYS_AT_ONCE:
                yield
        parts.append(Part(slot, arguments))
    merge: Merge = sum_of_replies
    if split.merge is ReplyMerge.LIST:
        merge = partial(array_in_order, places=list(places.values()))
    elif split.merge is ReplyMerge.ONE_OK:
        merge = first_of
    return Plan(parts, merge)


def _without_keys(routed: OverlayCommand, request: Request) -> Plan:
    parts = [Part(None, request)]
    # Redis before 7 has no tips; the command table has those of Redis 7.4.
    tips = routed.facts.tips or (routed.command.facts.tips if routed.command is not None else ())
    if ALL_MASTERS.isdisjoint(tips):
        return Plan(parts)
    if ONE_SUCCEEDED in tips:
        return Plan(parts, one_success, on_all_masters=True, takes_errors=True)
    merge = next((JOINS[tip] for tip in tips if tip in JOINS), None)
    return Plan(parts) if merge is None else Plan(parts, merge, on_all_masters=True)
