"""What a fork of a process that has imported our programs does to run one of them, as a new Python would."""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NoReturn

IMPORTED = (
    *(f"resp_server.programs.{name}" for name in ("serve", "proxy", "state_server", "registry", "history_reader")),
    "resp_server.programs.worker",
    "state_backend.apply.applier",
    "state_backend.apply.compactor",
)
# The modules that are run as programs.
PROGRAMS = frozenset(IMPORTED) | {"state_backend.attach.partition_share"}
# Code that is run as a program: that of the process that reads a checkpoint.
CODE = "from state_backend.attach.reader_process import main; main()"
# The modules of the subcommands of `sparkis` that are forks.
OF_COMMANDS = (
    "spark_hooks.cli",
    "spark_hooks.config_command",
    *(f"resp_server.programs.{name}" for name in ("configuration", "health", "status", "stop", "swap_check")),
    *(f"state_backend.{name}" for name in ("attach.reader_process", "attach.partition_share", "log.promotion")),
)
# A fork's descriptors get their numbers from numbers that none of them has.
ASIDE = 512
# The namespaces of a host: network, mounts, name, processes (`CLONE_NEW*`).
NAMESPACES = 0x40000000 | 0x00020000 | 0x04000000 | 0x20000000
# The room for the arguments that `ps` shows (guess).
ARGUMENT_BYTES_MAX = 4096


def import_programs() -> None:
    """Import all programs, and see to it that a fork copies few pages."""
    for name in (*IMPORTED, *OF_COMMANDS, "uvloop"):
        import_module(name)
    import_module("resp_server.commands").command_table()  # to build it is half of a server's start
    gc.collect()
    gc.freeze()  # a collection in a fork would write to all pages


def enter_host(pid: int) -> None:
    """Have this process, which has one thread, and its children be in the namespaces of a process; 0: stay."""
    if pid:
        descriptor = os.pidfd_open(pid)
        if ctypes.CDLL(None).setns(descriptor, NAMESPACES):
            os._exit(1)
        os.close(descriptor)


def place(descriptors: Sequence[int], numbers: Sequence[int]) -> None:
    """Give a fork's descriptors their numbers."""
    aside = [fcntl.fcntl(each, fcntl.F_DUPFD, ASIDE) for each in descriptors]
    for each in descriptors:
        os.close(each)
    for each, number in zip(aside, numbers, strict=True):
        os.dup2(each, number)
        os.close(each)


def show_arguments(arguments: Sequence[str]) -> None:
    """Have `ps` and /proc show these arguments, as those of a Python: tests find processes by them."""
    if sys.platform != "linux":
        return
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    text = "\0".join([sys.executable, *arguments]).encode()[: end - start - 1]
    ctypes.memmove(start, text.ljust(end - start, b"\0"), end - start)


def run_to_end(arguments: Sequence[str]) -> NoReturn:
    """Run a program, and end this process with its exit code; an exception is printed, as Python does."""
    code = _exit_code_of(arguments)
    atexit._run_exitfuncs()
    if not sys.stdout.closed:
        sys.stdout.flush()
    os._exit(code)  # Python's own end frees all objects, and so copies all pages that forks share


def _exit_code_of(arguments: Sequence[str]) -> int:
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _run(arguments: Sequence[str]) -> None:
    for stream in (sys.stdout, sys.stderr):
        is_unbuffered = stream is sys.stderr or stream.isatty() or bool(os.environ.get("PYTHONUNBUFFERED"))
        stream.reconfigure(line_buffering=is_unbuffered)  # type: ignore[union-attr]
    sys.orig_argv = [sys.executable, *arguments]
    what, *given = arguments[1:] if arguments[0] in ("-m", "-c") else arguments
    sys.argv = [what, *given]
    if arguments[0] == "-m":
        sys.modules.pop(what, None)  # what it imports stays; `runpy` warns if what it runs is imported
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.argv[0] = "-c"
        sys.modules["__main__"] = module = ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(module))
    else:
        runpy.run_path(what, run_name="__main__")
