"""A supervisor runs one server as long as an executor lives: real processes, whose insides alone are stand-ins."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net import children
from resp_server.programs import executor_supervisor as supervisor
from resp_server.programs.executor_supervisor import ENDED, FAILED, STORE, WatchedProcess, start_of
from resp_server.registry import report

# A server that writes its id down, says where it listens, and does what it is told to by files in its folder.
SERVER = """
import json, os, signal, sys, threading, time
folder = sys.argv[1]
def ends(*_):
    open(folder + "/drained", "a").close()
    if not os.path.exists(folder + "/stubborn"):
        os._exit(1)
signal.signal(signal.SIGTERM, ends)
if os.path.exists(folder + "/broken"):
    sys.exit("the port is taken")
with open(folder + "/servers", "a") as servers:
    servers.write(f"{os.getpid()}\\n")
print(json.dumps({"host": "127.0.0.1", "port": 7401}), flush=True)
def reads():
    sys.stdin.read()
    os._exit(1)
threading.Thread(target=reads, daemon=True).start()
while not os.path.exists(folder + "/leave"):
    if os.path.exists(folder + "/flood"):
        for number in range(20_000):
            print("a line that is rather long, about nothing in particular", number, file=sys.stderr)
        open(folder + "/flooded", "a").close()
        os.remove(folder + "/flood")
    time.sleep(0.01)
"""


class Scene:
    """An executor that only sleeps, and a folder of it."""

    def __init__(self, tmp_path: Path) -> None:
        self.folder = tmp_path / "folder"
        self.server = tmp_path / "server"
        for folder in (self.folder, self.server, self.folder / STORE):
            folder.mkdir()
        self.executor = subprocess.Popen(["sleep", "600"])
        self.stderr = tmp_path / "stderr"

    def start(self, *, before: str = "", stderr: Any = None) -> int:
        """Start a supervisor as a task does; return its exit code, which is there when the supervisor is."""
        lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        module = "from resp_server.programs import executor_supervisor as supervisor"
        program = f"import os, sys\n{module}\n{before}\nsys.exit(supervisor.main())"
        command = [sys.executable, "-c", program, "--lock", str(lock), "--folder", str(self.folder)]
        command += ["--watch", f"{self.executor.pid}:{start_of(self.executor.pid)}"]
        command += ["--", sys.executable, "-c", SERVER, str(self.server)]
        with open(self.stderr, "ab") as file:
            done = subprocess.run(
                command,
                env=children.environment(),
                pass_fds=(lock,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=file if stderr is None else stderr,
                timeout=WAIT_S_MAX,
                check=False,
            )
        os.close(lock)
        return done.returncode

    @property
    def is_kept(self) -> bool:
        """Return whether somebody has the lock."""
        with open(self.folder / "lock", "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    @property
    def servers(self) -> list[int]:
        """The process ids of the servers that were started, in order."""
        path = self.server / "servers"
        return [int(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def supervisor(self) -> int:
        """The process id of the supervisor, which is the server's parent."""
        return int(Path(f"/proc/{self.servers[-1]}/stat").read_text().rpartition(")")[2].split()[1])

    def end_executor(self) -> None:
        """Kill the executor, and wait until the supervisor has ended."""
        supervisor = self.supervisor
        self.executor.kill()
        self.executor.wait()
        eventually(lambda: start_of(supervisor) is None)

    def say(self, word: str) -> None:
        (self.server / word).touch()

    def has_said(self, word: str) -> bool:
        return (self.server / word).exists()

    def close(self) -> None:
        self.executor.kill()
        self.executor.wait()
        for pid in self.servers:
            eventually(lambda pid=pid: start_of(pid) is None)


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    made = Scene(tmp_path)
    yield made
    made.close()


def test_running_server_holds_lock(scene: Scene):
    assert scene.start() == 0
    assert scene.is_kept
    eventually(lambda: "state server started @ 127.0.0.1:7401" in scene.stderr.read_text())
    (server,) = scene.servers
    assert os.getsid(server) == server  # no signal to the executor's group reaches it


def test_server_drains_and_ends_with_its_executor(scene: Scene):
    scene.start()
    eventually(lambda: bool(scene.servers))
    scene.end_executor()
    assert scene.has_said("drained")
    assert start_of(scene.servers[0]) is None
    assert not scene.folder.exists()


def test_server_not_ending_in_time_is_killed(scene: Scene):
    scene.say("stubborn")
    scene.start(before="supervisor.STOP_S_MAX = 2.0")
    eventually(lambda: bool(scene.servers))
    scene.end_executor()
    assert scene.has_said("drained")
    assert start_of(scene.servers[0]) is None


def test_executor_end_is_noticed_without_pidfd(scene: Scene):
    scene.start(before="del os.pidfd_open")
    eventually(lambda: bool(scene.servers))
    supervisor = scene.supervisor
    os.kill(scene.servers[0], signal.SIGKILL)
    eventually(lambda: len(scene.servers) == 2)
    scene.executor.kill()
    scene.executor.wait()
    eventually(lambda: start_of(supervisor) is None)
    assert start_of(scene.servers[1]) is None


def test_executor_lost_before_watch_gets_no_lasting_server(scene: Scene):
    watched = scene.executor.pid, start_of(scene.executor.pid)
    scene.executor.kill()
    scene.executor.wait()
    lock = os.open(scene.folder / "lock", os.O_RDWR | os.O_CREAT)
    command = [
        sys.executable,
        "-m",
        "resp_server.programs.executor_supervisor",
        "--lock",
        str(lock),
        "--folder",
        str(scene.folder),
    ]
    command += ["--watch", f"{watched[0]}:{watched[1]}", "--", sys.executable, "-c", SERVER, str(scene.server)]
    ended = subprocess.run(command, pass_fds=(lock,), env=children.environment(), stderr=subprocess.PIPE, check=False)
    os.close(lock)
    assert ended.returncode == 0
    eventually(lambda: not scene.folder.exists())


def test_dead_server_is_restarted(scene: Scene):
    scene.start()
    for number in (1, 2):
        eventually(lambda number=number: len(scene.servers) == number)
        os.kill(scene.servers[-1], signal.SIGKILL)
    eventually(lambda: len(scene.servers) == 3)
    assert scene.is_kept
    assert "the state server ended with code -9; starting another in 0 s" in scene.stderr.read_text()


def test_server_ending_by_itself_is_not_restarted(scene: Scene):
    scene.start()
    eventually(lambda: bool(scene.servers))
    supervisor = scene.supervisor
    scene.say("leave")
    eventually(lambda: start_of(supervisor) is None)
    assert (scene.folder / ENDED).exists()
    assert not (scene.folder / STORE).exists()
    assert not scene.is_kept


def test_killed_supervisor_ends_its_server(scene: Scene):
    scene.start()
    eventually(lambda: bool(scene.servers))
    os.kill(scene.supervisor, signal.SIGKILL)
    eventually(lambda: start_of(scene.servers[0]) is None)
    assert not scene.is_kept
    assert not scene.has_said("drained")


def test_supervisor_with_sigterm_ends_its_server_first(scene: Scene):
    scene.start()
    eventually(lambda: bool(scene.servers))
    supervisor = scene.supervisor
    os.kill(supervisor, signal.SIGTERM)
    eventually(lambda: start_of(supervisor) is None)
    assert start_of(scene.servers[0]) is None
    assert scene.folder.exists()  # the executor lives, and its next task may want a server


def test_supervisor_waits_for_longer_than_server_hands_over():
    assert supervisor.STOP_S_MAX > report.DRAIN_S_MAX


def test_reason_of_failed_server_start_is_noted_for_next_task(scene: Scene):
    scene.say("broken")
    scene.start(before="supervisor.PAUSE_S = supervisor.PAUSE_S_MAX = 0.01")
    eventually((scene.folder / FAILED).exists)
    eventually(lambda: (scene.folder / FAILED).read_text() == "the state server ended with code 1: the port is taken")
    (scene.server / "broken").unlink()
    eventually(lambda: not (scene.folder / FAILED).exists())
    assert len(scene.servers) == 1


def test_output_of_server_is_logged_by_executor_and_floods_are_cut(scene: Scene):
    scene.start()
    eventually(lambda: bool(scene.servers))
    scene.say("flood")
    eventually(lambda: scene.has_said("flooded"))
    lines = scene.stderr.read_text().splitlines()
    assert "a line that is rather long, about nothing in particular 0" in lines
    assert len(lines) == 60


def test_unread_output_delays_no_server(scene: Scene):
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    try:
        while True:
            os.write(writes, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(writes, True)
    scene.start(stderr=writes)
    eventually(lambda: bool(scene.servers))
    scene.say("flood")
    eventually(lambda: scene.has_said("flooded"))
    os.kill(scene.servers[0], signal.SIGKILL)
    eventually(lambda: len(scene.servers) == 2)
    os.close(reads)
    os.close(writes)


def test_process_id_with_other_start_time_is_another_process():
    assert not WatchedProcess(os.getpid(), start_of(os.getpid())).has_ended()
    assert WatchedProcess(os.getpid(), "1").has_ended()


def test_zombie_process_counts_as_ended(scene: Scene):
    watched = WatchedProcess(scene.executor.pid, start_of(scene.executor.pid))
    assert not watched.has_ended()
    scene.executor.kill()
    eventually(watched.has_ended)
    watched.close()
