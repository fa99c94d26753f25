"""Which servers answer a request, how it is split, and how their replies are merged, by its command's row. Pure.

A request with keys is sent to the owner of their slot. A request with keys of several slots is split if the command's
row allows it. The replies are added up or put in order. The proxy itself answers commands without keys, except those
about the keys or jobs of all servers.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from random import choices
from typing import NamedTuple

import hiredis

from resp_server.command.keys import keys_of
from resp_server.command.policy import Policy, ReplyMerge, SpecialCommand
from resp_server.command.table import Command
from resp_server.protocol.errors import CrossSlotError
from resp_server.protocol.replies import encode
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.raw_reply import RawReply, Steps
from resp_server.raw_replies.reply_sinks import Merge
from resp_server.raw_replies.reply_splitter import array_in_order, joined, sum_of_replies
from resp_server.session.account import Account
from state_backend.model.slots import HASH_BITS, SLOTS, slot_of

# Keys of a request that are hashed in one step (guess: 0.2 ms).
KEYS_AT_ONCE = 128

SLOT_BITS = SLOTS.bit_length() - 1

# The replies to RANDOMKEY without a key.
NO_KEY = (b"$-1\r\n", b"_\r\n")


def within(user: Account) -> Request:
    """Return the prefix STATE WITHIN for requests about all keys: it limits them to the keys that the user may read."""
    if user.reads_all_keys:
        return ()
    return (b"STATE", b"WITHIN", b"%d" % len(user.read_patterns), *user.read_patterns)


class TargetRequest(NamedTuple):
    """The part of a request for one target.

    Args:
        target: The slot of its keys, or (index of the cluster, slot).
    """

    target: Hashable
    request: Request


def split_by_slot(
    command: Command, request: Request, target_of: Callable[[bytes], Hashable] = slot_of
) -> tuple[list[TargetRequest], Merge] | None:
    """Return the parts of a request and the function that merges their replies; None if the request is malformed.

    The proxy itself replies with the error of a malformed request. CrossSlotError if a request cannot be split.

    Args:
        target_of: Returns the target of a key; may raise.
    """
    steps = split_in_steps(command, request, target_of)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            found: tuple[list[TargetRequest], Merge] | None = end.value
            return found


def split_in_steps(
    command: Command, request: Request, target_of: Callable[[bytes], Hashable] = slot_of
) -> Steps[tuple[list[TargetRequest], Merge] | None]:
    """Do the same as `split_by_slot`, in steps."""
    keys = [key for key, _ in keys_of(command.facts, request) or ()]
    if not keys:
        return None
    places: dict[Hashable, list[int]] = {}
    for place, key in enumerate(keys):
        places.setdefault(target_of(key), []).append(place)
        if not place % KEYS_AT_ONCE:
            yield
    if len(places) == 1:
        return [TargetRequest(next(iter(places)), request)], _only
    if not command.policy.is_split_by_slot:
        raise CrossSlotError
    parts = []
    for target, some in places.items():
        parts.append(TargetRequest(target, (request[0], *(keys[place] for place in some))))
        if not len(parts) % KEYS_AT_ONCE:
            yield
    return parts, partial(merge_parts, command.policy, places=list(places.values()))


def merge_parts(
    policy: Policy, replies: Sequence[RawReply], places: Sequence[Sequence[int]]
) -> RawReply | Steps[RawReply]:
    """Merge the replies to the parts of a read, whose command has this policy.

    Args:
        places: The places of each part's keys among all keys.
    """
    is_summed = policy.split is not None and policy.split.merge is ReplyMerge.SUM
    return sum_of_replies(replies) if is_summed else array_in_order(replies, places)


def _only(replies: Sequence[RawReply]) -> RawReply:
    return replies[0]


def merge_all(special: SpecialCommand | None, replies: Sequence[RawReply], weights: Sequence[int]) -> RawReply:
    """Merge all shards' replies about their keys.

    Args:
        weights: Each shard's number of slots.
    """
    if special is SpecialCommand.DBSIZE:
        return sum_of_replies(replies)
    if special is SpecialCommand.KEYS:
        return joined(replies)
    found = [row for row in zip(replies, weights, strict=True) if row[0] not in NO_KEY]
    return choices([reply for reply, _ in found], [weight for _, weight in found])[0] if found else replies[0]


# A cursor consists of the cluster's index, the slot, and a hash within the slot, in this order. So all servers and
# proxies understand it.
POSITION_BITS = SLOT_BITS + HASH_BITS
APPLICATIONS_MAX = 1 << (53 - POSITION_BITS)


def scan_reply_up_to_slot(reply: bytes, last_slot: int, cluster_index: int = 0, cluster_count: int = 1) -> bytes:
    """Return a reply to SCAN without keys after the last slot of a run. Other servers own the slots after it."""
    reader = hiredis.Reader()
    reader.feed(reply)
    cursor, keys = reader.gets()
    position = int(cursor)
    behind = (last_slot + 1) << HASH_BITS
    if position == 0 or position >= behind:
        position = behind if last_slot + 1 < SLOTS else 0
        keys = [key for key in keys if slot_of(key) <= last_slot]
    if position or cluster_index + 1 < cluster_count:
        position |= (cluster_index if position else cluster_index + 1) << POSITION_BITS
    return encode([b"%d" % position, keys], 2)
