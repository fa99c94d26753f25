"""The process of a command: the signals that end it, and the file that gets its noise and that of its children."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from compat.waiting import WAIT_S_MAX

PROGRAM = """
import subprocess, sys
from pathlib import Path

from compat.waiting import WAIT_S_MAX
from compat.waiting import WAIT_S_MAX
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


def test_noise_goes_to_file_and_other_output_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "new" / "noise.log"
    for _ in range(2):  # the file begins anew
        assert run(file).stderr == "shown\nafter\n"
        assert file.read_text() == "of Python\nof a child\n"
    assert file.stat().st_mode & 0o777 == 0o600


def test_file_that_cannot_be_written_is_error() -> None:
    assert "FileExistsError" in run(Path("/dev/null/noise.log")).stderr


MANY_SIGNALS = """
import signal, threading
from spark_hooks.command_process import EndSignal

end, main = EndSignal(), threading.main_thread()
sender = threading.Thread(target=lambda: [signal.pthread_kill(main.ident, signal.SIGTERM) for _ in range(20_000)])
sender.start()
while sender.is_alive():
    end.wait(0.001)
print(end.is_set(), end.wait(), end.wait(0))
"""


def test_many_signals_at_once_end_command_once() -> None:
    ended = subprocess.run([sys.executable, "-c", MANY_SIGNALS], capture_output=True, text=True, timeout=WAIT_S_MAX)
    assert (ended.stdout, ended.stderr, ended.returncode) == ("True True True\n", "", 0)
