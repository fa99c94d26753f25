"""Change code in one place at a time, run its tests, and list the changes that no test notices.

    python scripts/mutation.py state_backend/log                 a sample of 60 changes
    python scripts/mutation.py resp_server/acl --sample 0        all changes: hours
    python scripts/mutation.py state_backend/log/terms.py --seed 7
    python scripts/mutation.py resp_server/backends --tests tests/differential/test_overlay.py --tests tests/server


The changes are those of mutmut. Its own runner first runs all tests to note which of them call which function, which
takes longer than a sample of changes. Here a folder's tests are those of the folder of the same name in tests/unit, and
the properties below, or the groups of `--tests`. A change is run by one group after the other, up to the one that
notices it, so it is seen what the last group notices that the groups before it do not. Two processes work on a copy of
the checkout each; the checkout itself is not changed.
"""

from __future__ import annotations

import argparse
import difflib
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import NamedTuple

from libcst import Module
from mutmut.mutation.file_mutation import Mutation, create_mutations, deep_replace

ROOT = Path(__file__).parents[1]
# Tests of a folder beside its unit tests.
OTHER_TESTS = {
    "resp_server/backends/stores": ("unit/resp_server/pipeline", "unit/resp_server/commands"),
    "resp_server/protocol": (
        "properties/test_requests.py",
        "properties/test_encoding.py",
        "properties/test_proxy_frames.py",
    ),
    "state_backend/lmdb": (
        "properties/test_packing.py",
        "properties/test_stores_agree.py",
        "properties/test_snapshots_in_parts.py",
        "properties/test_whole_epochs.py",
    ),
    "state_backend/log": ("properties/test_change_log_chain.py", "properties/test_whole_epochs.py"),
}
PYTEST = ("-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--hypothesis-profile", "mutation")
# A change that makes the tests take this much more processor time counts as noticed: it may run for ever. On a busy
# machine, tests take longer without any change. pytest ends a test that waits for ever (see `faulthandler_timeout`).
SLOWER_MAX = 4
LEAST_CPU_S = 20


class Mutant(NamedTuple):
    """One change of a file."""

    path: str
    module: Module
    mutation: Mutation

    def code(self) -> str:
        """Return the whole file after the change, made at each call: to make thousands takes minutes."""
        changed = deep_replace(self.module, self.mutation.original_node, self.mutation.mutated_node)
        return changed.code

    def diff(self) -> str:
        """Return the change as a diff without context."""
        before = (ROOT / self.path).read_text().splitlines()
        lines = difflib.unified_diff(before, self.code().splitlines(), self.path, self.path, lineterm="", n=0)
        return "\n".join(list(lines)[2:])


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Yield the changes of a file, except those that `tool.mutmut` in pyproject.toml leaves out."""
    code, name = path.read_text(), str(path.relative_to(ROOT))
    module, mutations, _, _ = create_mutations(name, code)
    for mutation in mutations:
        yield Mutant(name, module, mutation)


def tests_of(path: str) -> list[str]:
    """Return the tests of a file or folder: first those of the file alone, which notice most of its changes.

    A folder without tests of its own has those of the folder above it.
    """
    folder = Path(path).parent if path.endswith(".py") else Path(path)
    own = sorted((ROOT / "tests/unit" / folder).glob(f"test_{Path(path).stem}*.py"))
    others = OTHER_TESTS.get(str(folder), ())
    while folder.parts and not (ROOT / "tests/unit" / folder).exists():
        folder = folder.parent
    found = [f"tests/unit/{folder}", *(f"tests/{name}" for name in others)] if folder.parts else []
    return [*(str(each.relative_to(ROOT)) for each in own), *found]


class Copy:
    """A copy of the checkout in which files are changed. wait_s: how long its tests wait for a condition."""

    def __init__(self, folder: Path, wait_s: int) -> None:
        self._root = folder
        listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        compiled = (str(each.relative_to(ROOT)) for each in ROOT.glob("*_*/**/*.so"))
        for name in [*listed.splitlines(), *compiled]:
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target)
        waiting = folder / "compat/waiting.py"
        waiting.write_text(waiting.read_text().replace("WAIT_S_MAX = 300.0", f"WAIT_S_MAX = {wait_s}.0"))

    def passes(self, tests: Sequence[str], cpu_s: int = resource.RLIM_INFINITY) -> bool:
        """Run tests; return whether they pass within some processor time."""
        environment = {**os.environ, "PYTHONPATH": str(self._root), "PYTHONDONTWRITEBYTECODE": "1"}
        started = subprocess.Popen(
            [sys.executable, *PYTEST, *tests],
            cwd=self._root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            resource.prlimit(started.pid, resource.RLIMIT_CPU, (cpu_s, cpu_s))
            return started.wait() == 0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(started.pid, signal.SIGKILL)  # processes that a failed test left

    def notices(self, mutant: Mutant, tests: Sequence[str], cpu_s: int) -> bool:
        """Return whether tests notice a change."""
        path = self._root / mutant.path
        path.write_text(mutant.code())
        try:
            return not self.passes(tests, cpu_s)
        finally:
            shutil.copyfile(ROOT / mutant.path, path)


def cpu_s_of_children() -> float:
    """Return the processor time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


class Runner:
    """Runs changes, each by groups of tests up to the first that notices it. groups: none: the tests of its file."""

    def __init__(self, copies: Sequence[Copy], groups: Sequence[str]) -> None:
        self._copies: SimpleQueue[Copy] = SimpleQueue()
        for copy in copies:
            self._copies.put(copy)
        self._groups = [group.split() for group in groups]
        self._limits_s: dict[tuple[str, ...], int] = {}

    def _tests_of(self, path: str) -> list[list[str]]:
        return self._groups or [tests_of(path)]

    def prepare(self, paths: Iterable[str]) -> None:
        """Measure the tests of files without any change; SystemExit if they fail."""
        copy = self._copies.get()
        for tests in [tests for path in paths for tests in self._tests_of(path)]:
            if tuple(tests) not in self._limits_s:
                before_s = cpu_s_of_children()
                if not copy.passes(tests):
                    sys.exit(f"these tests fail without a change: {' '.join(tests)}")
                used_s = round(cpu_s_of_children() - before_s)
                self._limits_s[tuple(tests)] = max(LEAST_CPU_S, SLOWER_MAX * used_s)
        self._copies.put(copy)

    def noticed_by(self, mutant: Mutant) -> list[str] | None:
        """Return the first group of tests that notices a change."""
        copy = self._copies.get()
        try:
            folder = str(Path(mutant.path).parent)
            for tests, measured in zip(self._tests_of(mutant.path), self._tests_of(folder), strict=True):
                if copy.notices(mutant, tests, self._limits_s[tuple(measured)]):
                    return tests
            return None
        finally:
            self._copies.put(copy)


def run(paths: Sequence[str], options: argparse.Namespace) -> int:
    """Run the changes of files and folders, and print those that no test notices; return their number."""
    files = sorted(
        file for path in paths for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("*.py"))
    )
    mutants = [mutant for file in files for mutant in mutants_of(file)]
    chosen = random.Random(options.seed).sample(mutants, min(options.sample or len(mutants), len(mutants)))
    print(f"{len(mutants)} changes in {len(files)} files; {len(chosen)} of them with seed {options.seed}", flush=True)
    left = 0
    with (
        tempfile.TemporaryDirectory(prefix="sparkis-mutation-") as folder,
        ThreadPoolExecutor(options.processes) as pool,
    ):
        copies = [Copy(Path(folder) / str(number), options.wait_s) for number in range(options.processes)]
        runner = Runner(copies, options.tests)
        runner.prepare(sorted({str(Path(mutant.path).parent) for mutant in chosen}))
        for number, (mutant, tests) in enumerate(zip(chosen, pool.map(runner.noticed_by, chosen), strict=True), 1):
            left += tests is None
            if tests is None or options.tests:
                print(
                    f"\n{mutant.path}: {'unnoticed' if tests is None else ' '.join(tests)}\n{mutant.diff()}", flush=True
                )
            if sys.stderr.isatty():
                print(f"\r{number} of {len(chosen)}, {left} unnoticed", end="", file=sys.stderr)
    return left


def main() -> None:
    """Run what the arguments name, and print the unnoticed changes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files or folders of state_backend or resp_server")
    parser.add_argument("--sample", type=int, default=60, help="the number of changes; 0: all (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="chooses the sample (default %(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="(default %(default)s)")
    parser.add_argument("--tests", action="append", default=[], help="a group of tests, run in place of the unit tests")
    parser.add_argument("--wait-s", type=int, default=60, help="how long a test waits (default %(default)s)")
    options = parser.parse_args()
    for path in options.paths:
        if not (ROOT / path).exists() or not (options.tests or tests_of(path)):
            parser.error(f"{path} does not exist, or has no folder of tests in tests/unit")
    print(f"\n{run(options.paths, options)} changes are not noticed by any test")


if __name__ == "__main__":
    main()
