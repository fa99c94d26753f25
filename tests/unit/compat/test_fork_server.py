"""Forks run what a new Python would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from compat.fork_server import STARTS, ForkedProcess, forked, is_forked
from resp_server.native import CORE
from state_backend.attach import reader_process
from tests.builders import put_value, value_state, write_log

PRINTS_ITS_ENVIRONMENT = "import os, sys; print(os.getcwd(), os.environ.get('A'), os.environ.get('B'), sys.argv)"


def run_program(*arguments: str, given: bytes = b"", **environment: str) -> tuple[bytes, int]:
    """Return what a program prints, and its exit code."""
    process = forked(arguments, environment)
    return process.communicate(given)[0], process.wait()


def test_program_has_callers_arguments_environment_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("B", "is not passed")
    printed, code = run_program("-c", PRINTS_ITS_ENVIRONMENT, "x", "y z", A="a")
    assert printed.decode() == f"{tmp_path} a None ['-c', 'x', 'y z']\n" and code == 0


def test_module_and_file_are_run_as_main(tmp_path: Path) -> None:
    assert run_program("-m", "json.tool", "--compact", given=b"[1, 2]") == (b"[1,2]\n", 0)
    (file := tmp_path / "program.py").write_text("import sys; print(__name__, sys.argv[1:])")
    assert run_program(str(file), "x") == (b"__main__ ['x']\n", 0)


@pytest.mark.parametrize(
    ("ending", "code"), [("pass", 0), ("raise SystemExit", 0), ("raise SystemExit(3)", 3), ("os.abort()", -6)]
)
def test_exit_code_is_that_of_program(ending: str, code: int) -> None:
    assert run_program("-c", f"import os; {ending}") == (b"", code)


@pytest.mark.parametrize(("ending", "said"), [("'why'", "why\n"), ("OSError('why')", "OSError: why\n")])
def test_failed_program_gives_its_reason(ending: str, said: str, capfd: pytest.CaptureFixture[str]) -> None:
    raised = f"SystemExit({ending})" if ending[0] == "'" else ending
    assert run_program("-c", f"raise {raised}") == (b"", 1)
    assert capfd.readouterr().err.endswith(said)


def test_program_runs_until_its_input_ends_or_it_is_killed() -> None:
    waiting = "import sys; print('begins', flush=True); sys.stdin.read()"
    first, second = (forked(["-c", waiting], {}) for _ in range(2))
    with first, second:
        for each in (first, second):
            assert each.stdout is not None and each.stdout.readline() == b"begins\n" and each.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(0)
        assert first.communicate()[0] == b"" and first.poll() == first.returncode == 0
        second.send_signal(signal.SIGKILL)
        assert second.wait() == -signal.SIGKILL


PRINTS_ITS_STATE = """
import os, signal, sys
blocked = signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, [])
print(os.getppid(), os.getcwd(), os.getsid(0) == os.getpid(), os.getpgid(0) == os.getpid(), blocked, flush=True)
os.write(int(sys.argv[1]), b"to its parent")
print("an error", file=sys.stderr)
"""


def test_fork_gets_same_arguments_and_descriptors_as_popen(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    command = [sys.executable, "-c", PRINTS_ITS_STATE, str(writing)]
    options: dict[str, Any] = {"cwd": tmp_path, "start_new_session": True, "pass_fds": [writing], "text": True}
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
    try:
        for made in (subprocess.Popen, ForkedProcess):
            process = made(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
            assert process.communicate()[0] == f"{os.getpid()} {tmp_path} True True True\nan error\n"
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGHUP])
        os.close(writing)
    with open(reading) as pipe:
        assert pipe.read() == "to its parent" * 2


@pytest.mark.parametrize(
    ("command", "are_forks"),
    [
        ("-m sparkis health", True),
        ("-m sparkis serve", True),
        ("-m sparkis attach", False),
        ("-m resp_server.programs.registry", True),
        ("-m json.tool", False),
        ("-c pass", False),
    ],
)
def test_our_programs_are_forks_unless_they_start_spark_or_have_terminal(command: str, are_forks: bool) -> None:
    start = {"args": [sys.executable, *command.split()], "shell": False, "executable": None, "preexec_fn": None}
    assert is_forked({**start, "env": None}) == are_forks
    assert not is_forked({**start, "env": {STARTS: "yes"}}) and not is_forked({**start, "env": None, "shell": True})
    assert not is_forked({**start, "args": ["python3", *command.split()], "env": None})
    reads_a_checkpoint = f"from {reader_process.__name__} import main; main()"
    assert is_forked({**start, "args": [sys.executable, "-c", reads_a_checkpoint], "env": None})


def test_programs_are_imported_already_with_core_or_without() -> None:
    code = "import sys; print('resp_server.serving.server' in sys.modules, sys.modules['resp_server.native'].CORE)"
    assert run_program("-c", code, SPARKIS_PURE="1")[0] == b"True python\n"
    if "SPARKIS_PURE" not in os.environ:
        assert run_program("-c", code)[0] == b"True %b\n" % CORE.encode()


STARTS_CHILD = """
import asyncio, os, sys
from compat.processes import children_of

async def main():
    started = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE, "start_new_session": True}
    options = ("--log", sys.argv[1], "--job", "j", "--store", sys.argv[2])
    command = (sys.executable, "-m", "state_backend.apply.applier")
    child = await asyncio.create_subprocess_exec(*command, *options, **started, env=os.environ | {"PASSED": "x"})
    line = await child.stdout.readline()
    (row,) = children_of(os.getpid()).items()
    print(row[0] == child.pid, b"--job" in row[1], os.getsid(child.pid) == child.pid, line[:10].decode())
    if sys.argv[3] == "kill":
        child.kill()
    child.stdin.close()
    print(await child.wait(), child.returncode)
    assert not await child.stdout.read() or sys.argv[3] != "kill"

asyncio.run(main())
"""


@pytest.mark.parametrize(("ending", "code"), [("end", 0), ("kill", -9)])
def test_child_of_program_is_fork_and_child_of_program(tmp_path: Path, ending: str, code: int) -> None:
    write_log(tmp_path / "log", "j", [value_state("s")], [put_value("s", b"j:s:a", b"1")])
    program = f"import runpy, sys; from compat import fork_server; fork_server.begin(['-m', 'a.serve']); {STARTS_CHILD}"
    printed, _ = run_program("-c", program, str(tmp_path / "log"), str(tmp_path / "store"), ending)
    assert printed.decode().splitlines() == ['True True True {"event": ', f"{code} {code}"]


def test_threads_start_programs_at_same_time() -> None:
    def start(number: int) -> tuple[bytes, int]:
        return run_program("-c", f"print({number}); raise SystemExit({number})")

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(start, range(32))) == [(b"%d\n" % number, number) for number in range(32)]
