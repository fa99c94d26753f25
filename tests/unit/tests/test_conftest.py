"""A run with an unexpected skip fails where CI is set, and the last line of any run is its result."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[2] / "conftest.py"
ROOT = CONFTEST.parents[1]

SKIPS_BY_MARK = "import pytest\n@pytest.mark.skip(reason='why not')\ndef test_one(): pass\n"
SKIPS_BY_CALL = "import pytest\ndef test_one(): pytest.skip('why not')\n"
SKIPS_MODULE = "import pytest\npytest.skip('why not', allow_module_level=True)\n"
EXPECTED_SKIP = "import pytest\n@pytest.mark.expected_skip({condition}, reason='why not')\ndef test_one(): {text}\n"
EXPECTED_FAILURE = "import pytest\n@pytest.mark.xfail\ndef test_one(): assert False\ndef test_two(): pass\n"
IMPORTS_DUCKDB = "import duckdb\ndef test_one(): assert duckdb\n"


def run_test_file(folder: Path, test: str, is_ci: bool) -> subprocess.CompletedProcess[str]:
    """Run one test file beside a copy of the conftest."""
    shutil.copy(CONFTEST, folder)
    (folder / "test_some.py").write_text(test)
    environment = {name: value for name, value in os.environ.items() if name != "CI"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({"CI": "true"} if is_ci else {})
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, check=False)


@pytest.mark.parametrize(
    "test", [SKIPS_BY_MARK, *(pytest.param(each, marks=pytest.mark.slow) for each in (SKIPS_BY_CALL, SKIPS_MODULE))]
)
def test_skip_fails_run_on_ci_and_is_named(tmp_path: Path, test: str) -> None:
    done = run_test_file(tmp_path, test, is_ci=True)
    assert done.returncode == 1
    assert "test_some.py" in done.stdout and "why not" in done.stdout


def test_expected_skip_does_not_fail_run_on_ci(tmp_path: Path) -> None:
    done = run_test_file(tmp_path, EXPECTED_SKIP.format(condition=True, text="assert False"), is_ci=True)
    assert done.returncode == 0 and "1 skipped" in done.stdout


def test_expected_skip_whose_condition_is_false_is_run(tmp_path: Path) -> None:
    assert (
        run_test_file(tmp_path, EXPECTED_SKIP.format(condition=False, text="assert False"), is_ci=True).returncode == 1
    )


def test_skip_outside_of_ci_does_not_fail_run(tmp_path: Path) -> None:
    assert run_test_file(tmp_path, SKIPS_BY_MARK, is_ci=False).returncode == 0


def test_expected_failure_is_no_skip(tmp_path: Path) -> None:
    assert run_test_file(tmp_path, EXPECTED_FAILURE, is_ci=True).returncode == 0


def test_nothing_is_printed_after_result(tmp_path: Path) -> None:
    done = run_test_file(tmp_path, IMPORTS_DUCKDB, is_ci=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].startswith("1 passed")
