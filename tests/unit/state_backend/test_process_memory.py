"""The settings of the C library about freed memory."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import os
from state_backend.process_memory import release_free_memory, retain_free_memory
{first}
def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident_bytes()
buffer = b"x" * (16 << 20)
del buffer
print(resident_bytes() - before)
release_free_memory()
print(resident_bytes() - before)
"""


@pytest.mark.parametrize("is_retained", [False, True])
def test_freed_memory_stays_only_if_process_asks_for_it(is_retained: bool) -> None:
    program = PROGRAM.format(first="retain_free_memory()" if is_retained else "")
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    freed, released = map(int, found.stdout.split())
    assert (freed > 8 << 20) == (is_retained and platform.libc_ver()[0] == "glibc")  # others have no `mallopt`
    assert released < 8 << 20
