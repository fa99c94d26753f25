"""Hosts of a test, each with its own network, mounts, processes and name, and a router that loses packets when told.

    with Network() as network:
        one, two = network.host("one"), network.host("two")
        process = one.start(["redis-server", "--port", "6379"])
        network.cut(one, two)           # packets of both directions are dropped, and nothing is closed
        one.stop()                      # kill all of its processes at once

A host is a process that holds Linux' namespaces, so it needs root. Nothing of it has a name outside: no interface, no
file, no mount. It ends with its standard input, and all of its processes with it: when this process is killed, nothing
stays behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from compat.fork_server import forked
from compat.processes import children_of

PREFIX = "10.39"
CLONE_NEWNET = 0x40000000
PROGRAMS = ("ip", "unshare", "nsenter", "mount", "umount")
# The namespaces of a host: network, mounts, name, processes.
SPACES = ("--net", "--mount", "--uts", "--pid")
# The table of routes through the process that delays packets.
DELAYED_TABLE = "100"
# A program of Python that becomes another program.
EXECUTE = "import os, sys; os.execvp(sys.argv[1], sys.argv[1:])"
# Process 1 of a host. It adopts orphans, and the kernel removes those that have ended.
INIT = """
trap '' CHLD
echo {name} >/proc/sys/kernel/hostname
echo 1 >/proc/sys/net/ipv4/ip_forward
ip link set lo up
echo ready
exec cat
"""


@cache
def missing() -> str:
    """Return why this machine cannot run hosts; empty: it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "hosts are namespaces of Linux, which need root"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"hosts need {', '.join(absent)} (Debian: iproute2, util-linux, mount)"
    if not os.path.exists("/dev/net/tun"):
        return "hosts need /dev/net/tun, to delay packets"
    with subprocess.Popen(["unshare", *SPACES, "--fork", "ip", "link", "add", "tried", "type", "veth"]) as tried:
        return "this machine allows no namespaces, or no links between them" if tried.wait() else ""


class HostProcess:
    """A process on a host."""

    def __init__(self, popen: subprocess.Popen[bytes], log: Path) -> None:
        self.popen, self.log = popen, log

    def read_json(self) -> dict[str, Any]:
        """Return the next line of its standard output that is JSON; AssertionError if it ends before."""
        assert self.popen.stdout is not None
        for line in self.popen.stdout:
            if line.startswith(b"{"):
                found: dict[str, Any] = json.loads(line)
                return found
        raise AssertionError(f"ended with {self.popen.wait()}: {self.output[-2000:]}")

    @property
    def output(self) -> str:
        """Its standard error so far."""
        return self.log.read_text(errors="replace")

    def kill(self) -> None:
        """Kill it, and wait for its end."""
        self.popen.kill()
        self.popen.wait()

    def close(self) -> None:
        """Kill it, and forget it."""
        self.kill()
        for stream in (self.popen.stdin, self.popen.stdout):
            assert stream is not None
            stream.close()


class Host:
    """A host of a network. It runs until `stop`, and again after the network's `start_up`."""

    def __init__(self, network: Network, number: int, name: str) -> None:
        self.name, self.address = name, f"{PREFIX}.{number}.2"
        self._network, self._number = network, number
        self._init: subprocess.Popen[bytes] | None = None
        self._mounts: dict[str, list[str]] = {}
        self._processes: list[HostProcess] = []
        self.pid = 0

    # -- the machine --------------------------------------------------------------------------------------------------

    def start_up(self) -> None:
        """Start the host, with the mounts that it had; `Network.start_up` also connects it."""
        pipe = subprocess.PIPE
        command = ["unshare", *SPACES, "--fork", "--kill-child", "--mount-proc", "--propagation", "private"]
        code = INIT.format(name=self.name)
        # SentFacts to end, `unshare` complains about a signal that cannot be blocked.
        self._init = subprocess.Popen([*command, "sh", "-c", code], stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL)
        assert self._init.stdout is not None
        assert self._init.stdout.readline() == b"ready\n", f"host {self.name} does not start"
        (self.pid,) = children_of(self._init.pid)
        for mount in self._mounts.values():
            self.run(*mount)

    def stop(self) -> None:
        """Kill all processes at once, as a loss of power does; the network has lost the host."""
        if self._init is None:
            return
        self._network.disconnect(self)
        assert self._init.stdin is not None and self._init.stdout is not None
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        self._init.stdin.close()
        for process in self._processes:  # the first process of a host ends when all others are waited for
            process.close()
        self._processes.clear()
        self._init.wait()
        self._init.stdout.close()
        self._init = None

    # -- its processes ------------------------------------------------------------------------------------------------

    def start(
        self, command: Sequence[str], *, log: Path | None = None, environment: Mapping[str, str] | None = None
    ) -> HostProcess:
        """Start a process, which is a fork if it runs a Python. log: the file of its standard error."""
        path = log or Path(os.devnull)
        arguments = command[1:] if command[0] == sys.executable else ["-c", EXECUTE, *command]
        with path.open("ab") as errors:
            popen = forked(arguments, os.environ if environment is None else environment, errors=errors, host=self.pid)
        self._processes.append(HostProcess(popen, path))
        return self._processes[-1]

    def run(self, *command: str) -> str:
        """Run a command to its end; return its output."""
        entering = ["nsenter", "--target", str(self.pid), *SPACES, "--"]
        done = subprocess.run([*entering, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stderr}"
        return done.stdout

    @contextmanager
    def network(self) -> Iterator[None]:
        """Have the sockets that this thread makes within the block belong to the host."""
        with open("/proc/thread-self/ns/net") as ours, open(f"/proc/{self.pid}/ns/net") as its:
            _set_network(its.fileno())
            try:
                yield
            finally:
                _set_network(ours.fileno())

    # -- its folders --------------------------------------------------------------------------------------------------

    def mount(self, folder: Path, *, shared: Path | None = None, bytes_max: int = 0) -> None:
        """Mount a shared folder, or an empty disk of a size, on this host alone; again when it starts again."""
        if shared is None:
            command = ["mount", "-t", "tmpfs", "-o", f"size={bytes_max}", "disk", str(folder)]
        else:
            command = ["mount", "--bind", str(shared), str(folder)]
        if shared is not None and str(folder) not in self._mounts:  # what is seen while it is not mounted
            self.run("mount", "-t", "tmpfs", "-o", "ro,size=4k", "empty", str(folder))
        self._mounts[str(folder)] = command
        self.run(*command)

    def has_mounted(self, folder: Path) -> bool:
        """Return whether something of this host is mounted there, or will be when it starts again."""
        return str(folder) in self._mounts

    def unmount(self, folder: Path) -> None:
        """Take a mounted folder away: its path leads to an empty folder that nothing can write to."""
        self.run("umount", "--lazy", str(folder))


def _set_network(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Network:
    """Hosts, and a router to which each has a link."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._router = Host(self, 0, "router")
        self._router.start_up()
        self.hosts: dict[str, Host] = {}
        self._delay: HostProcess | None = None
        self._stack = ExitStack()
        self._stack.callback(self._router.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def host(self, name: str) -> Host:
        """Return a host by its name; a new one is started."""
        if name not in self.hosts:
            made = self.hosts[name] = Host(self, len(self.hosts) + 1, name)
            self._stack.callback(made.stop)
            self.start_up(made)
        return self.hosts[name]

    def start_up(self, host: Host) -> None:
        """Start a host, and connect it to the router."""
        host.start_up()
        link = _link(host)
        gateway = host.address.removesuffix("2") + "1"
        both = ["netns", str(host.pid), "type", "veth", "peer", "name", link, "netns", str(self._router.pid)]
        subprocess.run(["ip", "link", "add", "eth0", *both], check=True)
        for number, name, address in ((self._router, link, gateway), (host, "eth0", host.address)):
            number.run("ip", "address", "add", f"{address}/24", "dev", name)
            number.run("ip", "link", "set", name, "up")
        host.run("ip", "route", "add", "default", "via", gateway)

    def disconnect(self, host: Host) -> None:
        """Take a host off the network."""
        if host is not self._router:
            self._router.run("ip", "link", "delete", _link(host))

    # -- faults -------------------------------------------------------------------------------------------------------

    def cut(self, one: Host, other: Host, *, both_ways: bool = True) -> None:
        """Drop the packets from one host to another, and those back, without a word to either."""
        for source, target in ((one, other), (other, one))[: 1 + both_ways]:
            self._rule(source, target, "blackhole")

    def isolate(self, host: Host) -> None:
        """Drop all packets to and from a host."""
        self._router.run("ip", "rule", "add", "priority", "10", "from", host.address, "blackhole")
        self._router.run("ip", "rule", "add", "priority", "10", "to", host.address, "blackhole")

    def delay(self, one: Host, other: Host, *, delay_ms: int, loss: float = 0.0) -> None:
        """Delay the packets between two hosts by up to a time, each way, and lose some."""
        if self._delay is None:
            words = [sys.executable, "-m", "tests.hosts.delayed_packets", str(delay_ms), str(loss)]
            self._delay = self._router.start(words, log=self._folder / "delayed.log")
            device = self._delay.read_json()["device"]
            self._router.run("ip", "link", "set", device, "up")
            self._router.run("ip", "route", "add", "default", "dev", device, "table", DELAYED_TABLE)
        for source, target in ((one, other), (other, one)):
            # Only as they come from the host: they come from the delaying process once more.
            self._rule(source, target, "lookup", DELAYED_TABLE, "iif", _link(source))

    def heal(self) -> None:
        """End all cuts and delays."""
        with suppress(AssertionError):  # until there is none
            while True:
                self._router.run("ip", "rule", "delete", "priority", "10")
        if self._delay is not None:
            self._delay.kill()
            self._delay = None

    def _rule(self, source: Host, target: Host, *what: str) -> None:
        ends = ("from", source.address, "to", target.address)
        self._router.run("ip", "rule", "add", "priority", "10", *ends, *what)


def _link(host: Host) -> str:
    """Return the name of a host's link at the router."""
    return f"to-{host.name}"
