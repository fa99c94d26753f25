"""`make fuzz`: coverage-guided fuzzing for some time, then a report of coverage and memory growth."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from compat.conformance.environments import prepared
from compat.fuzz import corpus
from compat.fuzz.lines import ROOT, Line, Tracer, all_lines
from compat.fuzz.seeds import first_inputs, names
from compat.fuzz.subject import FoundError, Subject

INPUT_BYTES_MAX = 2048
# An input takes milliseconds, and some seconds on a busy machine; a minute is a hang.
HANG_SECONDS = 60
RSS_MIB_MAX = 1024
# The length of libFuzzer's last output that is printed: the exception, and the input.
OUTPUT_CHARS_MAX = 6000
# The process may grow by this much in the second half of its inputs. In the first half caches fill, and the allocator
# keeps memory of freed servers. Measured on a busy machine: 34 MiB in the second 30 s, 20 MiB in the second 120 s, with
# as many Python objects after 4,500 inputs as after 900. A leak of 64 KiB an input is more.
GROWTH_MIB_MAX = 64
# libFuzzer's progress line: the number of inputs, and the size of the process.
PROGRESS = re.compile(r"^#(\d+)\s+\w+.*rss: (\d+)Mb", re.MULTILINE)
DONE = re.compile(r"stat::number_of_executed_units:\s*(\d+)")
# The dictionary of the fuzzer, in addition to the names of commands.
PIECES = (b"\r\n", b"*1\r\n$", b"*2\r\n$3\r\n", b"$-1\r\n", b"*-1\r\n", b"\r\n$0\r\n\r\n")
WORDS = b"""
j:v:1 j:m:l j:l:s j:s:l j:z:l j: MATCH COUNT TYPE NOVALUES RANK MAXLEN AUTH SETNAME WITHVALUES WITHSCORES BYSCORE
BYLEX REV LIMIT REDIRECT BCAST PREFIX OPTIN OPTOUT NOLOOP ON OFF SKIP YES NO ID ADDR SKIPME default secret
notify-keyspace-events KEA maxmemory ~* +@all -@all allkeys nopass >pw FILTERBY ACLCAT PATTERN CH IDX LEN MINMATCHLEN
BIT BYTE STORE GET ASC DESC ALPHA BY # nosort
""".split()


@dataclass
class Run:
    """libFuzzer's report of a run. growth_mib: in the second half of the inputs."""

    inputs: int
    growth_mib: int
    rss_mib: int
    exit_code: int
    output: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz; return 1 if a bug was found."""
    parser = argparse.ArgumentParser("python -m compat.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for how long (60)")
    parser.add_argument("--store", action="store_true", help="store the inputs that reach all lines as the new corpus")
    options = parser.parse_args(arguments)
    stored = corpus.stored()
    with TemporaryDirectory(prefix="sparkis-fuzz-") as name:
        folder = Path(name)
        seeds = folder / "seeds"
        seeds.mkdir()
        for number, data in enumerate([*stored, *first_inputs(stored)]):
            (seeds / f"{number:05d}").write_bytes(data)
        run = _run(folder, seeds, options.seconds)
        inputs = sorted((path.read_bytes() for path in seeds.iterdir()), key=lambda each: (len(each), each))
        # The process has stored the inputs that raised an exception. The inputs that killed it are in this folder.
        for path in folder.iterdir():
            if path.name.startswith(("timeout-", "oom-")):
                print(f"found: {corpus.store_finding([path.read_bytes()])}")
    chosen, reached = choose(inputs)
    everything = all_lines()
    print(
        f"{run.inputs} inputs in {options.seconds} s; in the second half of them the process grew by "
        f"{run.growth_mib} MiB to {run.rss_mib} MiB"
    )
    print(f"{len(reached & everything)} of {len(everything)} lines reached, by {len(chosen)} inputs")
    if options.store and run.exit_code == 0:
        corpus.store(chosen)
    has_grown = run.growth_mib > GROWTH_MIB_MAX
    if has_grown:
        print(f"that is more than the {GROWTH_MIB_MAX} MiB that it may grow by")
    if run.exit_code:
        print(run.output[-OUTPUT_CHARS_MAX:])
    return int(has_grown or run.exit_code != 0)


def _run(folder: Path, seeds: Path, seconds: int) -> Run:
    words = folder / "words"
    words.write_text("".join(f'"{_escaped(word)}"\n' for word in (*_command_words(), *WORDS, *PIECES)), "ascii")
    command = [sys.executable, "-m", "compat.fuzz.atheris_run", str(seeds), f"-dict={words}"]
    command += [f"-max_len={INPUT_BYTES_MAX}", f"-timeout={HANG_SECONDS}", f"-rss_limit_mb={RSS_MIB_MAX}"]
    command += [f"-artifact_prefix={folder}/", f"-max_total_time={seconds}", "-print_final_stats=1"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(prepared("fuzz")), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    output = (done.stderr + done.stdout).decode("utf-8", "replace")
    counted = DONE.search(output)
    growth, ended = growth_and_end(output)
    return Run(int(counted.group(1)) if counted else 0, growth, ended, done.returncode, output)


def growth_and_end(output: str) -> tuple[int, int]:
    """Return by how many MiB the process grew in the second half of its inputs, and its size at the end."""
    sizes = [(int(number), int(rss)) for number, rss in PROGRESS.findall(output)]
    if not sizes:
        return 0, 0
    inputs, ended = sizes[-1]
    first_half = [rss for number, rss in sizes if number <= inputs / 2]
    return ended - (first_half[-1] if first_half else sizes[0][1]), ended


def choose(inputs: Iterable[bytes]) -> tuple[list[bytes], set[Line]]:
    """Return the inputs needed to reach all lines that any input reaches, and these lines; earlier inputs first."""
    subject, tracer = Subject(), Tracer()
    chosen: list[bytes] = []
    reached: set[Line] = set()
    for data in inputs:
        try:
            lines = tracer.run(partial(subject.run, data))
        except FoundError:
            lines = tracer.reached
        if lines - reached:
            chosen.append(data)
            reached |= lines
    subject.close()
    return chosen, reached


def _command_words() -> list[bytes]:
    return [part.encode() for name in names() for part in name.split("|")]


def _escaped(word: bytes) -> str:
    return "".join(chr(code) if 32 < code < 127 and code not in b'"\\' else f"\\x{code:02X}" for code in word)


if __name__ == "__main__":
    sys.exit(main())
