"""Writes of keys that the states have, too, are counted by rule; each backend gets its own names of the keys."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from resp_server.backends.overlay.legacy_writers import WATCH_S, WINDOW_S, WRITES_MIN, LegacyWriterDetector
from resp_server.backends.routing.rules import Rule, parse_rules
from resp_server.protocol.request_parser import Request
from resp_server.raw_replies.answers import ReplyFuture, ask

RULES = """
[[rule]]
name = "same"
keys = "same/<x>"
owner = "prefer-state"

[[rule]]
name = "whole"
keys = "whole/<x>"
owner = "prefer-state"
state_key = "golden:whole:<x>"
database = 2

[[rule]]
name = "field"
keys = "field/<x>/<y>"
owner = "prefer-state"
state_key = "golden:field:<x>"
field = "<y>"

[[rule]]
name = "other"
keys = "other/<x>"
owner = "state"
"""


class Sides:
    """Both sides. keys: the requests about keys that exist. asked: all requests, of the upstream with the database."""

    def __init__(self, *keys: Request) -> None:
        self.keys = set(keys)
        self.asked: list[tuple[bytes, ...] | tuple[int, bytes]] = []
        self.now_s = 1000.0
        self.watch = LegacyWriterDetector(self.ask_states, self.ask_upstream, lambda: self.now_s)

    def ask_states(self, request: Request) -> ReplyFuture:
        self.asked.append(tuple(request))
        return ask(lambda sink, index: sink.put(index, b":1\r\n" if tuple(request) in self.keys else b":0\r\n"))

    def ask_upstream(self, key: bytes, database: int) -> ReplyFuture:
        self.asked.append((database, key))
        return ask(lambda sink, index: sink.put(index, b":1\r\n"))


def rules() -> Sequence[Rule]:
    return parse_rules(RULES, "rules")


@pytest.mark.parametrize(
    ("key", "database", "of_states"),
    [
        (b"same/7", 0, (b"EXISTS", b"same/7")),
        (b"whole/7", 2, (b"EXISTS", b"golden:whole:7")),
        (b"field/7/apdex", 0, (b"HEXISTS", b"golden:field:7", b"apdex")),
    ],
)
def test_written_key_is_copy_if_states_have_it_by_their_name(key: bytes, database: int, of_states: Request) -> None:
    sides = Sides(of_states)
    sides.watch.watch(rules())
    for _ in range(WRITES_MIN):
        assert sides.watch.refusal(rules()) is None
        sides.watch.changed([key])
    assert sides.asked == [(database, key), of_states] * WRITES_MIN
    name = key.partition(b"/")[0].decode()
    refusal = sides.watch.refusal(rules())
    assert refusal is not None and refusal.startswith(f"rule '{name}': ") and f"'{key.decode()}'" in refusal
    assert sides.watch.info_fields() == {"copiers": name, "copied_writes": WRITES_MIN}
    sides.now_s += WINDOW_S
    assert sides.watch.refusal(rules()) is None


def test_key_that_states_do_not_have_is_no_copy() -> None:
    sides = Sides()
    sides.watch.watch(rules())
    for _ in range(WRITES_MIN):
        sides.watch.changed([b"field/7/apdex", b"other/7", b"nobody's"])
    assert sides.watch.refusal(rules()) is None
    assert len(sides.asked) == 2 * WRITES_MIN  # only about the first key


def test_rules_are_watched_first_if_known_state_can_have_their_keys() -> None:
    sides = Sides()
    assert sides.watch.wait_s(rules(), ["field/<x>/<y>", "whole/<x>"]) == 0  # the clients' names are no state's
    assert sides.watch.wait_s(rules(), ["golden:field:<x>"]) == WATCH_S
    sides.watch.watch(rules())
    sides.now_s += 1
    assert sides.watch.wait_s(rules(), ["golden:whole:<x>"]) == WATCH_S - 1
