"""redis-cli and redis-benchmark, as they are installed with redis-server."""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Callable
from typing import Any

from compat.conformance.wire import requests
from compat.swap_programs.outcomes import Outcomes
from compat.swap_programs.targets import Target

TOOL_S_MAX = 300.0
# No history file, no colours.
ENVIRONMENT = {"TERM": "dumb", "HOME": "/nonexistent"}
PIPED = 5_000
# Addresses, ages and speeds differ in each run.
CHANGING = re.compile(r"\d+\.\d+|(?<=127\.0\.0\.1:)\d+")


def run(target: Target, program: str, *arguments: str, given: bytes | None = None) -> str:
    """Run a program to its end, and return what it prints, with its exit code if that is an error."""
    command = [program, "-p", str(target.port), *arguments]
    environment = {**os.environ, **ENVIRONMENT}
    done = subprocess.run(command, input=given, capture_output=True, timeout=TOOL_S_MAX, env=environment, check=False)
    text = (done.stdout + done.stderr).decode("utf-8", "replace")
    return text if not done.returncode else f"{text}exit code {done.returncode}"


def redis_cli(target: Target) -> Outcomes:
    """Run each of redis-cli's checks."""
    return {name: check(target) for name, check in CLI_CHECKS.items()}


def redis_benchmark(target: Target, count: int = 2_000) -> Outcomes:
    """Run the default set of benchmarks, with and without pipelines: each must end without an error."""
    found: Outcomes = {}
    for name, options in {"default set": (), "-P 16": ("-P", "16", "-r", "1000")}.items():
        text = run(target, "redis-benchmark", "-n", str(count), "--csv", *options)
        rows = [line for line in text.splitlines() if line.startswith('"')]
        for row in csv.DictReader(rows):
            found[f"{name}: {row['test']}"] = "done"
        found[f"{name}: errors"] = [line for line in text.splitlines() if "rror" in line or "exit code" in line]
    return found


def piped(target: Target) -> Outcomes:
    """Load keys with `redis-cli --pipe`: counters, lists, hashes, and what the server has afterwards."""
    writes: list[list[bytes]] = []
    for number in range(PIPED):
        name = b"%d" % number
        writes += [[b"SET", b"piped:" + name, name], [b"RPUSH", b"list", name], [b"HSET", b"hash", name, name]]
    found: Outcomes = {"writes": run(target, "redis-cli", "--pipe", given=requests(writes))}
    found["writes with errors"] = run(
        target, "redis-cli", "--pipe", given=requests([[b"LPUSH", b"hash", b"x"], [b"NOPE"], [b"SET", b"a", b"1"]])
    )
    with target.redis.connect() as connection:
        found["keys"] = [connection.call(*words).plain for words in (("LLEN", "list"), ("HLEN", "hash"))]
        found["the last key"] = connection.call("GET", f"piped:{PIPED - 1}").plain.decode()
    return found


def _commands(*lines: str, options: tuple[str, ...] = ()) -> Callable[[Target], Any]:
    """Return a check: commands on standard input, and all that redis-cli prints."""
    given = "".join(f"{line}\n" for line in lines).encode()
    return lambda target: run(target, "redis-cli", "--no-raw", *options, given=given).splitlines()


def _listed(*arguments: str) -> Callable[[Target], Any]:
    """Return a check: what an option of redis-cli prints, in any order, without what changes with each run."""

    def check(target: Target) -> Any:
        with target.redis.connect() as connection:
            for number in range(30):
                connection.call("SET", f"cli:{number}", "x" * number)
        return sorted(CHANGING.sub("#", line) for line in run(target, "redis-cli", *arguments).splitlines())

    return check


CLI_CHECKS: dict[str, Callable[[Target], Any]] = {
    "strings": _commands("set a 1", "get a", "incrby a 41", "get missing", "append a x", "incr a", "getdel a"),
    "lists, sets, hashes": _commands(
        *("rpush l a b c", "lrange l 0 -1", "lpop l 2", "sadd s x", "smembers s", "hset h f v g w", "hgetall h"),
        *("zadd z 1 a 2 b", "zrange z 0 -1 withscores", "type z", "object encoding h", "del l s h z"),
    ),
    "RESP3": _commands("hset h f v", "hgetall h", "zadd z 1.5 a", "zscore z a", "del h z", options=("-3",)),
    "streams": _commands(
        "xadd st 1-1 f v", "xrange st - +", "xgroup create st g 0", "xreadgroup group g c streams st >"
    ),
    "transactions": _commands("multi", "set t 1", "incr t", "exec", "watch t", "multi", "get t", "discard", "exec"),
    "scripts": _commands("eval return(redis.call('incr',KEYS[1])) 1 n", "script load return(1)", "evalsha ffff 0"),
    "databases": _commands("select 3", "set only3 1", "dbsize", "select 0", "get only3", "swapdb 3 4", "move a 5"),
    "errors": _commands("nope", "get", "lpush a", "set a 1", "lpush a x", "getrange a x y", "expire a nan"),
    "blocking": _commands("blpop empty 0.1", "rpush full x", "blpop empty full 1", "brpop full 0.1"),
    "--scan": _listed("--scan", "--pattern", "cli:*"),
    "--bigkeys": _listed("--bigkeys"),
    "--memkeys": _listed("--memkeys"),
    "-r, -i": lambda target: run(target, "redis-cli", "-r", "3", "-i", "0.01", "incr", "repeated"),
    "-x": lambda target: run(target, "redis-cli", "-x", "set", "from standard input", given=b"bytes\0\r\n"),
    "-n": lambda target: run(target, "redis-cli", "-n", "2", "set", "in database 2", "1"),
    "--csv, --json": lambda target: [
        run(target, "redis-cli", form, "mget", "from standard input", "missing") for form in ("--csv", "--json")
    ],
    "--eval": lambda target: run(
        target, "redis-cli", "--eval", "/dev/stdin", "k", ",", "v", given=b"return {KEYS, ARGV}"
    ),
    "--rdb": lambda target: run(target, "redis-cli", "--rdb", "-").partition("\n")[0],
}
