"""`sparkis serve --cluster FILE`: the file is read at the start and when it changes; a bad one changes nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.servers import CONTROL_TOKEN, Running, sparkis_server
from compat.conformance.wire import Connection
from compat.waiting import WAIT_S_MAX, eventually
from state_backend.model.slots import slot_of

ADDRESS = "sparkis.example.org:7000"


def topology(version: int, here: str, there: str) -> dict[str, Any]:
    nodes = [
        {"host": "sparkis.example.org", "port": 7000, "slots": here},
        {"host": "10.1.2.3", "port": 7001, "slots": there},
    ]
    return {"version": version, "nodes": nodes}


def write(path: Path, text: str) -> None:
    """Replace a file at once, as its readers may look at any moment."""
    path.with_suffix(".new").write_text(text)
    os.replace(path.with_suffix(".new"), path)


def wait_for(server: Running, connections: int, key: str, expected: bytes) -> None:
    """Wait until a key is answered so on each of several connections."""
    opened = [server.connect() for _ in range(connections)]
    eventually(lambda: {each.call("GET", key).raw for each in opened}, lambda found: found == {expected})


def wait_until_refused(capfd: Any) -> None:
    """Wait until the server says that it does not show a new content of its file."""
    said = [""]

    def listen() -> str:
        said.append(capfd.readouterr().err)
        return "".join(said)

    eventually(listen, lambda text: "the current topology stays in use" in text)


@pytest.mark.parametrize("workers", ["1", "2"])
def test_new_topology_is_shown_by_all_workers(dataset_log: Path, tmp_path: Path, workers: str, capfd: Any) -> None:
    moved = b"-MOVED %d 10.1.2.3:7001\r\n" % slot_of(b"plain")
    path = tmp_path / "cluster.json"
    write(path, json.dumps(topology(1, "0-16383", "")))
    options = ("--cluster", str(path), "--cluster-node", ADDRESS, "--workers", workers)
    with sparkis_server(tmp_path / "store", dataset_log, *options) as server:
        wait_for(server, 4, "plain", b"$5\r\nvalue\r\n")
        write(path, json.dumps(topology(2, "", "0-16383")))
        wait_for(server, 4, "plain", moved)
        for bad in ("{", json.dumps(topology(1, "0-16383", "")), json.dumps(topology(3, "0-1", "1-2"))):
            write(path, bad)
            wait_until_refused(capfd)
            wait_for(server, 4, "plain", moved)
        write(path, json.dumps(topology(3, f"{slot_of(b'plain')}", "")))
        wait_for(server, 4, "plain", b"$5\r\nvalue\r\n")
        wait_for(server, 4, "foo", b"-CLUSTERDOWN Hash slot not served\r\n")


@pytest.mark.parametrize(
    ("text", "name", "complaint"),
    [
        ("{", ADDRESS, "cluster.json: the topology is not JSON"),
        (json.dumps(topology(1, "0-1", "1-2")), ADDRESS, "slots 1 have two owners"),
        (json.dumps(topology(1, "0-1", "2-2")), "10.9.9.9:1", "no node '10.9.9.9:1' in version 1 of the topology"),
        (json.dumps(topology(1, "0-1", "2-2")), None, "--cluster FILE needs --cluster-node HOST:PORT"),
    ],
)
def test_server_does_not_start_with_bad_topology(
    dataset_log: Path, tmp_path: Path, text: str, name: str | None, complaint: str
) -> None:
    path = tmp_path / "cluster.json"
    write(path, text)
    command = [sys.executable, "-m", "resp_server.programs.serve", "--port", "0", "--log", str(dataset_log)]
    command += ["--store", str(tmp_path / "store"), "--cluster", str(path)]
    command += [] if name is None else ["--cluster-node", name]
    done = subprocess.run(command, capture_output=True, timeout=WAIT_S_MAX, text=True, check=False)
    assert done.returncode == 1
    assert complaint in done.stderr


def test_topology_can_be_set_by_command(dataset_log: Path, tmp_path: Path) -> None:
    disabled = b"-ERR This instance has cluster support disabled\r\n"
    new = json.dumps(topology(1, "0-16383", ""))
    with (
        sparkis_server(tmp_path / "store", dataset_log) as server,
        server.connect() as client,
        Connection(server.control_port) as control,
    ):
        control.call("AUTH", CONTROL_TOKEN)
        assert client.call("CLUSTER", "SLOTS").raw == client.call("READONLY").raw == disabled
        assert control.call("TOPOLOGY", "nobody", new).raw.startswith(b"-ERR no node 'nobody' in version 1")
        assert control.call("TOPOLOGY", ADDRESS, "{").raw.startswith(b"-ERR the topology is not JSON")
        assert client.call("CLUSTER", "INFO").raw == disabled
        assert control.call("TOPOLOGY", ADDRESS, new).raw == b"+OK\r\n"
        assert client.call("CLUSTER", "SLOTS").plain[0][2][:2] == [b"sparkis.example.org", 7000]
        assert control.call("TOPOLOGY", ADDRESS, json.dumps(topology(1, "0-1", ""))).is_error
