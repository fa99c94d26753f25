"""Users of a server with several processes: all processes have the same users at once."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.servers import Running, sparkis_server
from compat.conformance.wire import Connection, request
from compat.waiting import eventually
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

STATES = [StateDescriptor("n", key="k", value="v")]
FILE = """\
user default on nopass ~* &* +@all
user tenant on >secret ~job:n:1 +@read
"""


@pytest.fixture(scope="module")
def acl_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("acl") / "users.acl"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, acl_file: Path) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("workers")
    with LogWriter(folder / "log", "job", STATES, "first") as writer:
        writer.publish([Change("n", Op.PUT, b"job:n:%d" % number, value=b"x") for number in (1, 2)], 0)
    with sparkis_server(folder / "store", folder / "log", "--workers", "2", "--aclfile", str(acl_file)) as running:
        yield running


@pytest.fixture
def both(server: Running) -> Iterator[list[Connection]]:
    """Two connections: one to each process."""
    with ExitStack() as stack:
        yield [stack.enter_context(Connection(server.port)) for _ in range(2)]


def log_in(connection: Connection, user: str, password: str) -> Any:
    return connection.call("AUTH", user, password).value


def test_user_made_at_one_process_is_known_at_other(both: list[Connection]) -> None:
    here, there = both
    assert here.call("ACL", "SETUSER", "made", "on", ">pass", "~job:n:2", "+get").value == b"OK"
    assert log_in(there, "made", "pass") == b"OK"
    assert there.call("GET", "job:n:2").value == b"x"
    assert there.call("GET", "job:n:1").value == b"NOPERM No permissions to access a key"
    assert here.call("ACL", "SETUSER", "made", "resetkeys", "~job:n:1").value == b"OK"
    assert there.call("GET", "job:n:2").value == b"NOPERM No permissions to access a key"
    assert there.call("GET", "job:n:1").value == b"x"


def test_deleted_user_is_cut_off_at_all_processes(both: list[Connection]) -> None:
    here, there = both
    here.call("ACL", "SETUSER", "gone", "on", "nopass", "+ping")
    log_in(there, "gone", "")
    assert here.call("ACL", "DELUSER", "gone", "nobody").value == 1
    with pytest.raises((EOFError, OSError)):
        there.call("PING")


def test_clients_of_user_deleted_and_remade_are_cut_off(server: Running, both: list[Connection]) -> None:
    here, there = both
    for _ in range(20):
        assert here.call("ACL", "SETUSER", "again", "on", "nopass", "+ping").value == b"OK"
        with Connection(server.port) as client:
            log_in(client, "again", "")
            here.send(request("ACL", "DELUSER", "again"))
            there.send(request("ACL", "SETUSER", "again", "on", "nopass", "+@all"))
            assert (here.read().value, there.read().value) == (1, b"OK")
            with pytest.raises((EOFError, OSError)):
                client.call("PING")


def test_user_that_deletes_itself_gets_reply_and_is_disconnected_then(both: list[Connection]) -> None:
    here, _ = both
    here.call("ACL", "SETUSER", "itself", "on", "nopass", "+@all")
    log_in(here, "itself", "")
    assert here.call("ACL", "DELUSER", "itself").value == 1
    with pytest.raises((EOFError, OSError)):
        here.call("PING")


def test_wrong_rule_is_error_and_changes_nothing(both: list[Connection]) -> None:
    here, there = both
    refused = here.call("ACL", "SETUSER", "tenant", "~*", "+nothing")
    assert refused.value == b"ERR Error in ACL SETUSER modifier '+nothing': Unknown command or category name in ACL"
    assert there.call("ACL", "LIST").plain == here.call("ACL", "LIST").plain
    assert b"~job:n:1 " in next(row for row in there.call("ACL", "LIST").plain if row.startswith(b"user tenant "))


def test_denials_of_all_processes_are_in_log(both: list[Connection]) -> None:
    here, there = both
    here.call("ACL", "LOG", "RESET")
    for each in both:
        assert each.call("AUTH", "tenant", "wrong").value.startswith(b"WRONGPASS ")
    assert [row[3] for row in there.call("ACL", "LOG").plain] == [b"auth"] * 2
    assert here.call("ACL", "LOG", "RESET").value == b"OK"
    assert there.call("ACL", "LOG").plain == []


def test_users_are_written_to_file_and_read_from_it(both: list[Connection], acl_file: Path) -> None:
    here, there = both
    here.call("ACL", "SETUSER", "kept", "on", "nopass", "+ping")
    assert here.call("ACL", "SAVE").value == b"OK"
    assert "user kept on nopass sanitize-payload resetchannels -@all +ping\n" in acl_file.read_text()
    acl_file.write_text(FILE)
    assert there.call("ACL", "LOAD").value == b"OK"
    assert here.call("ACL", "USERS").plain == [b"default", b"tenant"]
    acl_file.write_text(f"{FILE}user bad +nothing\n")
    assert there.call("ACL", "LOAD").value == (
        b"ERR %b:3: Error in applying operation '+nothing': Unknown command or category name in ACL. WARNING: ACL "
        b"errors detected, no change to the previously active ACL rules was performed" % bytes(acl_file)
    )
    assert here.call("ACL", "USERS").plain == [b"default", b"tenant"]
    acl_file.write_text(FILE)


def test_later_processes_have_changed_users(server: Running, both: list[Connection]) -> None:
    here, _ = both
    here.call("ACL", "SETUSER", "later", "on", "nopass", "+@all", "~*")
    assert here.call("CONFIG", "SET", "requirepass", "secret").value == b"OK"
    for pid in server.workers():
        os.kill(pid, signal.SIGKILL)
    with answering(server) as new:
        assert new.call("GET", "job:n:1").value == b"NOAUTH Authentication required."
        assert log_in(new, "later", "any") == b"OK"
        assert new.call("GET", "job:n:1").value == b"x"
        assert new.call("CONFIG", "SET", "requirepass", "").value == b"OK"


def answering(server: Running) -> Connection:
    """Connect to a process that answers: one that was killed may have been handed a connection before."""

    def connected() -> Connection | None:
        connection = Connection(server.port)
        with suppress(EOFError, OSError):
            connection.call("PING")
            return connection
        return None

    found = eventually(connected, awaited="a reply")
    assert found is not None
    return found
