"""The way back of a swap: the copying program starts again, and clients leave the proxy; no key is lost or old."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from compat.conformance.wire import Connection
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.records import Change, Op
from tests.server.overlay import STATES, VALUES, Overlay, delete_copies

NEW = {key: b"%d" % (number + 1000) for number, key in enumerate(VALUES)}
RULE = '[[rule]]\nkeys = "{}"\nowner = "{}"\n'


def rules(owner: str) -> str:
    return "".join(RULE.format(keys, owner) for keys in ("job:speed:<car>", "dash/<account>/apdex"))


def copy(upstream: Connection, values: dict[bytes, bytes]) -> None:
    """Do what the copying job does."""
    upstream.call("MSET", *(word for pair in values.items() for word in pair))


def read(client: Connection) -> list[bytes]:
    return [client.call("GET", key).plain for key in VALUES]


def test_rule_returns_clients_to_copies_and_to_upstream(tmp_path: Path) -> None:
    file = tmp_path / "routes.toml"
    file.write_text(rules("state"))
    with ExitStack() as stack:
        overlay = Overlay(tmp_path, stack, "--routes", str(file))
        with overlay.proxy.connect() as client, overlay.upstream.connect() as upstream:
            client.call("RPUSH", "events", "before")
            # The copying job is stopped, and the states go on.
            with LogWriter(overlay.log, "job", STATES, "first") as writer:
                changes = [("speed" if key.startswith(b"job:") else "apdex", key, new) for key, new in NEW.items()]
                writer.publish([Change(state, Op.PUT, key, value=new) for state, key, new in changes])
            eventually(lambda: read(client) == list(NEW.values()))

            copy(upstream, NEW)  # started again, it catches up
            file.write_text(rules("upstream"))
            assert client.call("STATE", "RELOAD").plain == 2
            assert read(client) == list(NEW.values())
            assert client.call("SET", "job:speed:1", "from the app").plain == b"OK"
            client.call("RPUSH", "events", "through the proxy")
            assert "has no old copies" in delete_copies(overlay, "--yes").stdout  # they are the upstream's keys now
        overlay.proxy.process.terminate()
        overlay.proxy.process.wait()
        with overlay.upstream.connect() as client:
            assert read(client) == [b"from the app" if key == b"job:speed:1" else new for key, new in NEW.items()]
            assert client.call("LRANGE", "events", "0", "-1").plain == [b"before", b"through the proxy"]


def test_release_returns_clients_to_copies(tmp_path: Path) -> None:
    with ExitStack() as stack:
        overlay = Overlay(tmp_path, stack)
        with overlay.proxy.connect() as client, overlay.upstream.connect() as upstream:
            assert read(client) == list(VALUES.values())
            copy(upstream, NEW)
            client.call("STATE", "RELEASE", "job")
            assert read(client) == list(NEW.values())
