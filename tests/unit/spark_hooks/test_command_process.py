"""The file that gets the noise of a program and of its children."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import subprocess, sys
from pathlib import Path
from spark_hooks.command_process import standard_error_in

with standard_error_in(Path(sys.argv[1])) as former:
    print("shown", file=former)
    print("of Python", file=sys.stderr)
    subprocess.run([sys.executable, "-c", "import sys; print('of a child', file=sys.stderr)"])
print("after", file=sys.stderr)
"""


def run(file: Path) -> subprocess.CompletedProcess[str]:
    """Run the program."""
    return subprocess.run([sys.executable, "-c", PROGRAM, str(file)], capture_output=True, text=True, check=False)


def test_noise_is_in_the_file_and_the_rest_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "new" / "noise.log"
    for _ in range(2):  # the file begins anew
        assert run(file).stderr == "shown\nafter\n"
        assert file.read_text() == "of Python\nof a child\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_file_that_cannot_be_written_is_an_error() -> None:
    assert "FileExistsError" in run(Path("/dev/null/noise.log")).stderr
