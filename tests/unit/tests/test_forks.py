"""Tests in several processes have the results that they have in one, whatever a process does."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forks import DURATIONS

ROOT = Path(__file__).parents[3]
CONFTEST = "from tests.forks import pytest_addoption, pytest_configure\n"
SHARED = """
import os, pytest

@pytest.fixture(scope="session")
def session_log(tmp_path_factory):
    yield os.getpid()
    with open("ended", "a") as ended:
        ended.write("session ")

@pytest.fixture(scope="module")
def number(session_log):
    return os.getpid()
"""
PASSES = SHARED + "@pytest.mark.parametrize('at', range(20))\ndef test_one(number, at): assert number == os.getpid()\n"
FAILS = "def test_one(tmp_path):\n    print('said ' + tmp_path.name)\n    assert 'left' == 'right'\n"
ENDS = "import os\ndef test_one(): pass\ndef test_two(): os._exit(7)\ndef test_three(): pass\n"


def run_test_files(folder: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run test files in two processes."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "--rootdir", str(folder), "--processes", "2", *options, str(folder)]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)


def test_files_that_pass_are_run_each_in_one_process(tmp_path: Path) -> None:
    done = run_test_files(tmp_path, **{f"file{at}": PASSES for at in range(5)})
    assert done.returncode == 0 and "100 passed" in done.stdout
    assert (tmp_path / "ended").read_text().split() == ["session"] * 5  # each file has such a fixture of its own


def test_failure_is_shown_with_its_output(tmp_path: Path) -> None:
    done = run_test_files(tmp_path, fails=FAILS, passes=PASSES)
    assert done.returncode == 1 and "1 failed, 20 passed" in done.stdout
    assert "said test_one0" in done.stdout and "assert 'left' == 'right'" in done.stdout


def test_process_that_ends_fails_its_test_and_others_are_run(tmp_path: Path) -> None:
    done = run_test_files(tmp_path, ends=ENDS, passes=PASSES)
    assert done.returncode == 1 and "1 failed, 22 passed" in done.stdout
    assert "the process ended within this test, with exit code 7" in done.stdout and "ends.py::test_two" in done.stdout


def test_no_file_begins_after_failure_with_exitfirst(tmp_path: Path) -> None:
    slow = "import time\ndef test_one(): time.sleep(1)\n"
    done = run_test_files(tmp_path, "-x", fails=FAILS, **{f"slow{at}": slow for at in range(20)})
    assert done.returncode != 0 and "1 failed" in done.stdout and "20 passed" not in done.stdout


@pytest.mark.parametrize("option", ["--collect-only", pytest.param("--durations=2", marks=pytest.mark.slow)])
def test_options_have_same_effect_as_in_one_process(tmp_path: Path, option: str) -> None:
    done = run_test_files(tmp_path, option, passes=PASSES)
    assert done.returncode == 0
    assert "20 tests collected" in done.stdout if option == "--collect-only" else "slowest 2 durations" in done.stdout


def test_stored_durations_are_of_files_that_are_there() -> None:
    assert [path for path in json.loads(DURATIONS.read_text()) if not (ROOT / path).is_file()] == []


def test_files_that_took_longest_begin_first(tmp_path: Path) -> None:
    said = "import time\ndef test_one():\n    open('order', 'a').write('{name} ')\n    time.sleep(0.2)\n"
    files = {name: said.format(name=name) for name in "abcd"}
    assert run_test_files(tmp_path, **files).returncode == 0
    stored = tmp_path / ".pytest_cache" / "v" / "sparkis" / "durations"
    took_s = json.loads(stored.read_text())
    assert [Path(name).stem for name in sorted(took_s)] == ["test_a", "test_b", "test_c", "test_d"] and min(
        took_s.values()
    ) >= 0.2
    stored.write_text(json.dumps({name: at for at, name in enumerate(sorted(took_s))}))
    (tmp_path / "order").write_text("")
    assert run_test_files(tmp_path, **files).returncode == 0
    assert (tmp_path / "order").read_text().split()[0] != "a"  # a process asks for its third file after its first
