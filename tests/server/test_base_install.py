"""What `pip install` without extras brings is enough to serve, and what needs Spark says so in a line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tarfile
import tomllib
import venv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import distribution
from pathlib import Path

import pytest
import redis

import sparkis
from compat.processes import killed_at_end
from tests.builders import put_value, value_state, write_log

ROOT = Path(__file__).parents[2]
WAIT_S_MAX = 60.0


def base_distributions() -> set[str]:
    """Return the names of what is installed without extras, with what these need themselves."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    found: set[str] = set()
    while declared:
        requirement = declared.pop()
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if "extra ==" not in requirement and name not in found:
            found.add(name)
            declared += distribution(name).requires or []
    return found


def installed(folder: Path, names: Iterable[str]) -> Path:
    """Make an interpreter that has this checkout and some distributions, and nothing else."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in names:
        for file in distribution(name).files or ():
            first = file.parts[0]
            if first not in ("..", "__pycache__") and not (packages / first).exists():
                (packages / first).symlink_to(Path(str(distribution(name).locate_file(first))))
    (packages / "sparkis.pth").write_text(str(ROOT))
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter that has this checkout and its base dependencies."""
    return installed(tmp_path_factory.mktemp("base"), base_distributions())


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK", "SPARK"))}


@contextmanager
def serving(python: Path, folder: Path, *options: str) -> Iterator[tuple[redis.Redis, Path]]:
    """Give a client of `sparkis serve` over a log with one key, and the file with the server's errors."""
    write_log(folder / "log", "job", [value_state("s")], [put_value("s", b"job:s:a", b"1")])
    command = [python, "-m", "sparkis", "serve", "--log", folder / "log", "--store", folder / "store", *options]
    with open(folder / "stderr", "w") as errors:
        process = subprocess.Popen(
            [*map(str, command), "--port", "0", "--child"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment(),
            cwd=folder,
        )
    assert process.stdout is not None and process.stdin is not None
    try:
        port = json.loads(process.stdout.readline())["port"]
        with redis.Redis(port=port, socket_timeout=WAIT_S_MAX) as client:
            yield client, folder / "stderr"
    finally:
        process.stdin.close()
        process.wait(WAIT_S_MAX)
        process.stdout.close()


def test_base_install_is_six_packages_beside_this_one() -> None:
    assert base_distributions() == {"hiredis", "lmdb", "numpy", "pyarrow", "tomlkit", "uvloop"}


def test_base_install_serves_log(python: Path, tmp_path: Path) -> None:
    with serving(python, tmp_path) as (client, errors):
        assert client.get("job:s:a") == b"1"
        assert client.info("server")["multiplexing_api"] == "uvloop"
        assert "uvloop" not in errors.read_text()


def test_server_without_uvloop_uses_asyncio_and_warns_once(tmp_path: Path) -> None:
    python = installed(tmp_path / "environment", base_distributions() - {"uvloop"})
    with serving(python, tmp_path, "--workers", "2") as (client, errors):
        assert client.get("job:s:a") == b"1"
        with client.pipeline(transaction=True) as queued:
            assert queued.get("job:s:a").exists("job:s:a", "job:s:b").execute() == [b"1", 1]
        assert client.info("server")["multiplexing_api"] == "asyncio"
        assert errors.read_text().count("uvloop is not installed") == 1


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), *arguments], env=environment(), capture_output=True, text=True, timeout=WAIT_S_MAX, cwd="/"
    )


def test_function_that_needs_spark_names_extra_in_one_line(python: Path) -> None:
    script = """
import sparkis
for name in sparkis.__all__:
    try:
        getattr(sparkis, name)
    except ImportError as error:
        print(error)
"""
    answered = run(python, "-c", script)
    assert answered.stderr == ""
    of_spark = {name for name, module in sparkis._MODULE_OF.items() if module.startswith("spark_hooks")}
    needing = sorted(of_spark - {"RowError", "ServedEndpoint"})
    assert sorted(answered.stdout.splitlines()) == [
        f"sparkis.{name} needs pyspark: pip install 'sparkis[spark]'" for name in needing
    ]


def test_command_that_needs_spark_names_extra_in_one_line(python: Path) -> None:
    for command, extra in (
        (["attach", "--checkpoint", "/nowhere", "--reader", "spark", "--list"], "spark"),
        (["demo"], "demo"),
    ):
        answered = run(python, "-m", "sparkis", *command)
        assert answered.returncode == 1
        (line,) = answered.stderr.splitlines()
        assert re.fullmatch(rf"sparkis {command[0]}: needs pyspark, .*: pip install 'sparkis\[{extra}\]'", line)


@pytest.mark.parametrize("command", ["ui", "top"])
def test_page_names_extra_in_one_line(python: Path, command: str) -> None:
    answered = run(python, "-m", "sparkis", command)
    assert answered.returncode == 1
    (line,) = answered.stderr.splitlines()
    assert re.fullmatch(rf"sparkis {command}: needs redis, .*: pip install 'sparkis\[ui\]'", line)


def test_checkpoint_is_inspected_read_and_attached_to_without_spark_and_java(python: Path, tmp_path: Path) -> None:
    with tarfile.open(ROOT / "tests" / "golden" / "airports.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    checkpoint = str(tmp_path / "airports")
    bare = environment() | {"PATH": "/nowhere", "HOME": str(tmp_path)}
    bare.pop("JAVA_HOME", None)

    def run_bare(*arguments: str) -> str:
        return subprocess.check_output([python, "-m", "sparkis", *arguments], env=bare, text=True, timeout=WAIT_S_MAX)

    assert "airports" in run_bare("inspect", checkpoint)
    assert "16174" in run_bare("get", checkpoint, "LAX")
    command = [python, "-m", "sparkis", "attach", "--checkpoint", checkpoint, "--serve", "--port", "0"]
    with killed_at_end(command, env=bare, text=True, stdout=subprocess.PIPE) as attached:
        assert attached.stdout is not None
        try:
            url = next(line for line in attached.stdout if "redis://" in line).split()[-1]
            with redis.Redis.from_url(url, decode_responses=True, socket_timeout=WAIT_S_MAX) as client:
                assert client.hget("airports:aggregation:LAX", "count") == "16174"
        finally:
            attached.terminate()
