"""Executors whose Python has no sparkis get it with the job: by `--py-files`, or in an archive."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from compat.waiting import WAIT_S_MAX

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).parents[2]
PACKAGES = ("sparkis", "state_backend", "resp_server", "spark_hooks")
# What Python has on clusters.
PACKAGES_OF_CLUSTER = ("pyarrow", "numpy", "pandas")
COMPILED = ("lmdb", "hiredis")
# Publishes a key, serves it, and prints it as a client reads it.
DRIVER = """
import sys
from pathlib import Path
import redis
import sparkis
from compat.waiting import WAIT_S_MAX
from tests.spark.micro_batches import Batches, local_session, start
_, folder, python, placement, *settings = sys.argv
pythons = {"spark.pyspark.python": python, "spark.pyspark.driver.python": sys.executable}
executors = {"spark.executor.memory": "512m", **pythons}
spark = local_session("local-cluster[1,1,1024]", **executors, **dict(each.split("=", 1) for each in settings))
folder = Path(folder)
endpoint = sparkis.serve(spark, log=folder / "log", placement=placement)
rows = Batches(spark, folder / "input", "k string, v long")
rows.add({"k": "a", "v": 7})
state = sparkis.StateDescriptor("last", key="k", value="v")
writer = sparkis.queryable(rows.df, state, mode="append", wait_for_visibility=WAIT_S_MAX)
query = start(writer, "job", folder / "checkpoint")
print(redis.Redis.from_url(endpoint.url).get("job:last:a").decode())
query.stop()
endpoint.stop()
spark.stop()
"""


def requirements(names: tuple[str, ...]) -> set[str]:
    """Return distributions, and what they need themselves."""
    left, found = list(names), set[str]()
    while left:
        requirement = left.pop()
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if "extra ==" not in requirement and name not in found:
            found.add(name)
            left += distribution(name).requires or []
    return found


def link(names: tuple[str, ...], folder: Path) -> None:
    """Put the packages of distributions into a folder."""
    for name in requirements(names):
        for file in distribution(name).files or ():
            first = file.parts[0]
            if first not in ("..", "__pycache__") and not (folder / first).exists():
                (folder / first).symlink_to(Path(str(distribution(name).locate_file(first))))


def without_sparkis(folder: Path, names: tuple[str, ...]) -> Path:
    """Make an interpreter that has some distributions, and not sparkis."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    link(names, packages)
    return folder / "bin" / "python"


def printed(folder: Path, python: Path, placement: str, **settings: str) -> str:
    """Run the job, and return what its client has read."""
    environment = {name: value for name, value in os.environ.items() if name != "PYSPARK_PYTHON"}
    arguments = [f"{name}={value}" for name, value in settings.items()]
    answered = subprocess.run(
        [sys.executable, "-c", DRIVER, str(folder), str(python), placement, *arguments],
        env=environment | {"PYSPARK_DRIVER_PYTHON": sys.executable},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
    )
    assert answered.returncode == 0, answered.stderr[-3000:]
    return answered.stdout.strip()


@pytest.mark.parametrize("placement", ["driver", "executors"])
def test_py_files_bring_sparkis_to_executors_that_have_its_compiled_packages(tmp_path: Path, placement: str):
    python = without_sparkis(tmp_path / "python", PACKAGES_OF_CLUSTER + (() if placement == "driver" else COMPILED))
    with zipfile.ZipFile(tmp_path / "sparkis.zip", "w") as archive:
        for package in PACKAGES:
            for path in (ROOT / package).rglob("*"):
                if path.suffix in (".py", ".json"):
                    archive.write(path, path.relative_to(ROOT))
    settings = {"spark.submit.pyFiles": str(tmp_path / "sparkis.zip")}
    assert printed(tmp_path, python, placement, **settings) == "7"


def test_archive_brings_sparkis_and_its_compiled_packages_to_executors(tmp_path: Path):
    python = without_sparkis(tmp_path / "python", PACKAGES_OF_CLUSTER)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    for package in PACKAGES:
        (libraries / package).symlink_to(ROOT / package)
    link(COMPILED, libraries)
    copied = shutil.copytree(libraries, tmp_path / "copied", ignore=shutil.ignore_patterns("__pycache__", "*.pyx"))
    archive = shutil.make_archive(str(tmp_path / "libraries"), "gztar", copied)
    settings = {"spark.archives": f"{archive}#libraries", "spark.executorEnv.PYTHONPATH": "libraries"}
    assert printed(tmp_path, python, "executors", **settings) == "7"
