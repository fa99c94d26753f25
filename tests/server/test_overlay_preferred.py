"""Keys whose rule is prefer-state: one side answers the whole key, the states if they have it."""

from __future__ import annotations

import signal

import pytest

from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.server.overlay import ABSENT, OLD, VALUES, Overlay

RULES = '[[rule]]\nname = "aside"\nkeys = "job:speed:<car>"\nowner = "prefer-state"\n'


def test_preferred_key_write_is_hidden_while_states_have_key(overlay: Overlay, client: Connection) -> None:
    client.send(b"SET job:speed:7 new\r\nGET job:speed:7\r\nSET job:speed:900 1\r\nINCR job:speed:900\r\n")
    client.send(b"GET job:speed:900\r\nDEL job:speed:900 job:speed:7\r\nGET job:speed:900\r\nGET job:speed:7\r\n")
    assert [client.read().plain for _ in range(8)] == [b"OK", b"70", b"OK", 2, b"2", 2, None, b"70"]
    assert client.call("MSET", "job:speed:5", "x", "dash/7/apdex", "y").is_error
    with overlay.upstream.connect() as upstream:
        assert upstream.call("GET", "job:speed:5").plain == OLD


def test_preferred_key_of_new_state_hides_upstreams(overlay: Overlay, client: Connection) -> None:
    states = [StateDescriptor("total", key_format="sum:<x>", value="n")]
    assert client.call("SET", "sum:1", "written").plain == b"OK"
    overlay.use_rules(RULES + '[[rule]]\nkeys = "sum:<x>"\nowner = "prefer-state"\n')
    with LogWriter(overlay.log, "other", states, "first-of-other") as writer:
        assert client.call("GET", "sum:1").plain == b"written"
        writer.publish([Change("total", Op.PUT, b"sum:1", value=b"1")])
        eventually(lambda: client.call("GET", "sum:1").plain == b"1")
        writer.publish([Change("total", Op.DELETE, b"sum:1")])
        eventually(lambda: client.call("GET", "sum:1").plain == b"written")
    assert overlay.info()["ownership_waiting"] == ""


def test_preferred_key_is_never_nil_while_states_get_and_lose_it(overlay: Overlay, client: Connection) -> None:
    client.call("SET", "flip:1", "upstream's")
    overlay.use_rules(RULES + '[[rule]]\nkeys = "flip:<x>"\nowner = "prefer-state"\n')
    states = [StateDescriptor("flip", key_format="flip:<x>", value="n")]
    found: set[bytes] = set()
    with LogWriter(overlay.log, "flips", states, "first-of-flips") as writer:
        for number in range(60):
            writer.publish([Change("flip", Op.DELETE if number % 2 else Op.PUT, b"flip:1", value=b"state's")])
            client.send(b"GET flip:1\r\n" * 50)
            found |= {client.read().plain for _ in range(50)}
        writer.publish([Change("flip", Op.PUT, b"flip:1", value=b"state's")])
        eventually(lambda: client.call("GET", "flip:1").plain == b"state's")
    assert found <= {b"upstream's", b"state's"}


@pytest.mark.parametrize(
    ("line", "before", "after"),
    [
        ("SUNION job:speed:1 a", "command 'sunion' needs keys of one backend: ", ", key 'a' is the upstream's"),
        ("XREAD BLOCK 0 STREAMS job:speed:1 0", "command 'xread' cannot block: ", ""),
    ],
)
def test_preferred_key_in_unsplittable_read_is_error(client: Connection, line: str, before: str, after: str) -> None:
    whose = "key 'job:speed:1' is a state's if it has the key, by the rule 'aside'"
    assert client.call(*line.split(" ")).plain.decode() == f"ERR {before}{whose}{after}"


def test_preferred_key_of_other_command_is_upstreams(client: Connection) -> None:
    assert client.call("XRANGE", "job:speed:none", "-", "+").plain == []
    assert client.call("XRANGE", "job:speed:1", "-", "+").plain == (
        b"ERR key 'job:speed:1' is a state's if it has the key, by the rule 'aside', and the states have it"
    )


def test_preferred_key_of_states_survives_paused_upstream(overlay: Overlay) -> None:
    with overlay.proxy.connect() as client:
        overlay.signal_upstream(signal.SIGSTOP)
        try:
            for number in range(1, 8):
                assert client.call("GET", f"job:speed:{number}").plain == VALUES[b"job:speed:%d" % number]
        finally:
            overlay.signal_upstream(signal.SIGCONT)
        assert client.call("GET", ABSENT).plain == OLD
