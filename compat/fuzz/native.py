"""`make fuzz-native`: fuzzes the compiled core, built with AddressSanitizer and UBSan.

An instrumented copy of the program is made in build/sanitized. Each part of the attack (see `native_run`) runs in a
separate process, which ends at the first finding of a sanitizer. The next process continues with another seed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from compat.fuzz.lines import ROOT

BUILT = ROOT / "build" / "sanitized"
PACKAGES = ("state_backend", "resp_server", "compat", "sparkis")  # sparkis: setup.py reads the version there
FILES = ("setup.py", "pyproject.toml", "README.md")
FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g -O1"
PARTS = ("requests", "records", "pages", "sockets", "forwarder")
# The length of a sanitizer's report that is printed: the finding and its stack.
REPORT_CHARS_MAX = 6000


def main(arguments: Sequence[str] | None = None) -> int:
    """Build and fuzz; return 1 if a bug was found."""
    parser = argparse.ArgumentParser("python -m compat.fuzz.native", description=__doc__)
    parser.add_argument("--seconds", type=int, default=120, help="for how long, all parts together (120)")
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers (1)")
    parser.add_argument("--parts", nargs="*", default=PARTS, choices=PARTS, help="of the attack (all)")
    options = parser.parse_args(arguments)
    build()
    findings = 0
    for part in options.parts:
        inputs, found = attack(part, options.seed, options.seconds / len(options.parts))
        print(f"{part}: {inputs} inputs, {found} findings", flush=True)
        findings += found
    return int(findings > 0)


def build() -> None:
    """Copy the program, and compile its native modules with sanitizers into the copy."""
    for package in PACKAGES:
        ignore = shutil.ignore_patterns("*.so", "__pycache__")
        shutil.copytree(ROOT / package, BUILT / package, ignore=ignore, dirs_exist_ok=True)
    for name in FILES:
        shutil.copy(ROOT / name, BUILT)
    environment = {**os.environ, "CFLAGS": FLAGS, "LDFLAGS": FLAGS}
    environment.pop("SPARKIS_PURE", None)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    made = subprocess.run(command, cwd=BUILT, env=environment, capture_output=True, text=True, check=False)
    if made.returncode or not list(BUILT.glob("resp_server/native/fast_path*.so")):
        raise SystemExit(f"the core could not be compiled with sanitizers:\n{made.stderr[-REPORT_CHARS_MAX:]}")


def attack(part: str, seed: int, seconds: float) -> tuple[int, int]:
    """Fuzz for some time; return the number of inputs, and how many of them ended a process."""
    ends_s, inputs, findings = monotonic() + seconds, 0, 0
    while (left_s := ends_s - monotonic()) > 0 and findings < 10:
        command = [sys.executable, "-m", "compat.fuzz.native_run", part, str(seed), str(left_s)]
        done = subprocess.run(
            command, cwd=BUILT, env=_environment(), capture_output=True, text=True, errors="replace", check=False
        )
        numbers = [int(line) for line in done.stdout.split() if line.isdecimal()]
        inputs += numbers[-1] if numbers else 0
        if done.returncode == 0:
            break
        findings += 1
        print(f"{part}, seed {seed}, after input {numbers[-1] if numbers else 0}:", file=sys.stderr)
        print(done.stderr[-REPORT_CHARS_MAX:], file=sys.stderr)
        seed += 1_000
    return inputs, findings


def _environment() -> dict[str, str]:
    libraries = [_library("libasan.so"), _library("libubsan.so")]
    return {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "PYTHONPATH": str(BUILT),
        "PYTHONMALLOC": "malloc",  # so that the sanitizers check the bounds of each Python object
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def _library(name: str) -> str:
    found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    path = Path(found.stdout.strip())
    if not path.is_absolute():
        raise SystemExit(f"gcc has no {name}: it comes with Debian's and Ubuntu's gcc")
    return str(path)


if __name__ == "__main__":
    sys.exit(main())
