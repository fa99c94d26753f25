"""redis-cli: at a terminal, with commands as arguments, and in its modes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shutil
import subprocess
import termios
from time import monotonic
from typing import Any

from compat.conformance.clients.scenario import PORT, At, main
from compat.conformance.wire import requests

PROGRAM = shutil.which("redis-cli") or "redis-cli"
RUN_S_MAX = 30.0
PROMPT = re.compile(r"(?:^|[\r\n])[\d.]+:\d+(?:\[\d+\])?(?:\(TX\))?> ")
TIME_TAKEN = re.compile(r"\(\d+\.\d+s\)")  # printed if a reply takes half a second, as on a busy machine
ESCAPE = re.compile(r"\x1b\[[\d;?]*[A-Za-z]")
ENVIRONMENT = {**os.environ, "TERM": "dumb", "HOME": "/nonexistent"}  # no history file, no colours


def options(at: At, port: int = 0) -> list[str]:
    """Return the program's connection options; in a cluster it follows redirections."""
    return [PROGRAM, "-h", at.host, "-p", str(port or at.port), *(["-c"] if at.is_cluster else [])]


def cli(at: At, *arguments: str, given: bytes | None = None, port: int = 0) -> str:
    """Run the program and return its output."""
    done = subprocess.run(
        [*options(at, port), *arguments],
        input=given,
        capture_output=True,
        timeout=RUN_S_MAX,
        env=ENVIRONMENT,
        check=False,
    )
    return PORT.sub("PORT", (done.stdout + done.stderr).decode("latin-1"))


class Terminal:
    """The program at a pseudo-terminal."""

    def __init__(self, at: At) -> None:
        self._main, child = pty.openpty()
        # Without a size, redis-cli asks the terminal for the position of the cursor.
        termios.tcsetwinsize(child, (40, 120))
        self._process = subprocess.Popen(
            options(at), stdin=child, stdout=child, stderr=child, env={**ENVIRONMENT, "TERM": "xterm"}
        )
        os.close(child)
        self.output = ""
        self.until(lambda text: PROMPT.search(text) is not None)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *ignored: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._main)

    def until(self, is_there: Any) -> str:
        """Read the output until `is_there` accepts it, and return it."""
        output, ends = "", monotonic() + RUN_S_MAX
        while not is_there(output):
            ready, _, _ = select.select([self._main], [], [], max(0.0, ends - monotonic()))
            if not ready:
                raise TimeoutError(f"the output is not what is expected: {output!r}")
            output += ESCAPE.sub("", os.read(self._main, 65_536).decode("latin-1"))
        return output

    def enter(self, line: str) -> list[str]:
        """Type a line, and return the lines of the reply."""
        os.write(self._main, line.encode() + b"\r")
        output = self.until(lambda text: "\r\n" in text and PROMPT.search(text.partition("\r\n")[2]) is not None)
        answer = output.partition("\r\n")[2]
        lines = [PORT.sub("PORT", each) for each in PROMPT.split(answer)[0].splitlines()]
        return [line for line in lines if line.strip() and not TIME_TAKEN.fullmatch(line)]

    def hint(self, text: str, expected: str) -> bool:
        """Type text without Enter, and return whether redis-cli prints a hint."""
        os.write(self._main, text.encode())
        return expected in self.until(lambda output: expected in output)


def one_command(at: At) -> Any:
    lines = (
        ["get", "plain"],
        ["--no-raw", "get", "plain"],
        ["--no-raw", "get", "missing"],
        ["--no-raw", "mget", "{tag}a", "{tag}missing"],
        ["--no-raw", "lrange", "list:short", "0", "-1"],
        ["--no-raw", "hget", "hash:odd", "empty value"],
        ["--csv", "lrange", "list:short", "0", "-1"],
        ["--no-raw", "ttl", "plain"],
        ["get", "hash:one"],
        ["nope", "a"],
    )
    return [cli(at, *line) for line in lines]


def interactive(at: At) -> Any:
    with Terminal(at) as terminal:
        found: list[Any] = [
            terminal.enter(line)
            for line in (
                "GET plain",
                'GET "with space"',
                "LRANGE list:short 0 -1",
                "GET hash:one",
                "NOPE a",
                "GET missing",
            )
        ]
        found.append(terminal.hint("getrange ", "key start end"))
    if not at.is_cluster:
        with Terminal(at) as terminal:
            found += [terminal.enter(line) for line in ("MULTI", "GET plain", "EXEC", "SELECT 1", "GET plain")]
    return found


def resp3(at: At) -> Any:
    return [
        cli(at, "-3", "--no-raw", "hgetall", "hash:one"),
        cli(at, "-3", "--no-raw", "get", "missing"),
        cli(at, "-3", "--no-raw", "lrange", "list:short", "0", "1"),
        sorted(json.loads(cli(at, "--json", "hgetall", "hash:small")).items()),
    ]


def standard_input(at: At) -> Any:
    return cli(at, given=b"get plain\nget 'with space'\nnope\nstrlen big\nlrange list:short 0 1\n").splitlines()


def scan(at: At) -> Any:
    return [sorted(cli(at, "--scan", *options).splitlines()) for options in ((), ("--pattern", "many:*"))]


def summary_of(output: str) -> list[str]:
    """Return the summary without parts that depend on the order of keys."""
    found = re.sub(r"-------- summary -------", "\n", output).splitlines()
    return sorted(line for line in found if line and not line.startswith(("[", "#")))


def bigkeys(at: At) -> Any:
    return summary_of(cli(at, "--bigkeys"))


def memkeys(at: At) -> Any:
    """Memory sizes, and the largest of similar keys, differ between servers, so they are left out."""
    found = summary_of(cli(at, "--memkeys"))
    lines = [re.sub(r"found '.*' has \d+|with \d+|avg size [\d.]+", "SIZE", line) for line in found]
    return sorted(lines)


def stat(at: At) -> Any:
    with subprocess.Popen(
        [*options(at), "-i", "0.01", "--stat"], stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline().split() for _ in range(4)]
        process.terminate()
    # Our nodes get the topology from a file, store all keys, and count them here.
    counts = [] if at.is_cluster else [line[0] for line in lines[2:]]
    return [lines[0], lines[1], counts, [len(line) for line in lines[2:]]]


def latency(at: At) -> Any:
    found = cli(at, "--latency", "-i", "0.1", "--raw").split()
    return [len(found), int(found[3]) > 0]


def pipe(at: At) -> Any:
    """Writes are refused one by one. In a cluster only reads are sent: the real node would accept a write."""
    sent = [[b"GET", b"{tag}a"], [b"GET", b"{tag}hash"], [b"ECHO", b"x"]]
    if not at.is_cluster:
        sent += [[b"SET", b"a", b"b"], [b"HSET", b"c", b"d", b"e"]]
    return sorted(cli(at, "--pipe", given=requests(sent)).splitlines())


def subscribe(at: At) -> Any:
    """Messages are printed as they arrive, until the program ends."""
    command = [*options(at), "--csv", "psubscribe", "n?ws"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        found = [process.stdout.readline()]
        while "n?ws" not in found[-1]:  # an earlier line explains how to leave
            found.append(process.stdout.readline())
        found.append(cli(at, "publish", "news", "hello"))
        found.append(process.stdout.readline())
        process.terminate()
    return found


def tls(at: At) -> Any:
    found = cli(at, "--tls", "--cacert", at.ca, "get", "plain", port=at.tls_port)
    return [found, "Error" in cli(at, "--tls", "get", "plain", port=at.tls_port) or "not refused"]


def acl(at: At) -> Any:
    """The texts of refusals are those of another version of Redis, so their codes are compared."""
    given = ("--no-auth-warning", "--user", at.user, "--pass", at.password)
    return [cli(at, *given, "get", "user:1:name"), cli(at, *given, "get", "plain").split(" ")[0]]


def cluster(at: At) -> Any:
    """Redirections are followed, and the cluster checks its slots."""
    if not at.is_cluster:
        return "not supported"
    found = cli(at, "--cluster", "check", f"{at.host}:{at.port}")
    return [
        [cli(at, "get", f"many:{number:03d}") for number in range(6)],
        sorted(line for line in found.splitlines() if line.startswith("[")),
    ]


FEATURES = {
    "one command": one_command,
    "at a terminal": interactive,
    "-3, --json": resp3,
    "commands on standard input": standard_input,
    "--scan": scan,
    "--bigkeys": bigkeys,
    "--memkeys": memkeys,
    "--stat": stat,
    "--latency": latency,
    "--pipe": pipe,
    "psubscribe": subscribe,
    "--tls": tls,
    "--user": acl,
    "-c, --cluster check": cluster,
}

if __name__ == "__main__":
    version = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True).stdout.split()[1]
    main(version, FEATURES)
