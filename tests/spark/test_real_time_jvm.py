"""A Scala and a Java job in Real-Time Mode, as docs/real-time.md prints them: rows are readable before their commit."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pyspark
import pytest
import redis

import sparkis
from compat.waiting import eventually
from spark_hooks.real_time.jvm_writer import JAR
from tests.spark.attaching import Attach, attached
from tests.spark.real_time import SETTINGS

__all__ = ["attached"]

pytestmark = pytest.mark.slow

SPARK = Path(pyspark.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "real-time.md").read_text()
SCALA, JAVA = Path(__file__).with_name("real_time.scala"), Path(__file__).with_name("RealTimeJob.java")
OPTIONS = {
    **SETTINGS,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}
TYPED = "typed"
Program = Callable[[Path, int], list[str | Path]]


def printed(language: str, folder: Path, port: int) -> str:
    """Return the page's statements, with a folder and a server of the test's own."""
    [statements] = re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    statements = statements.replace("127.0.0.1:7379", f"127.0.0.1:{port}")
    return str(statements.replace("5 minutes", "2 seconds").replace("/data/", f"{folder}/"))


def scala(folder: Path, port: int) -> list[str | Path]:
    """Return the command that runs the page's job: a shell, in which it is typed."""
    (folder / TYPED).write_text(SCALA.read_text().replace("// PAGE\n", printed("scala", folder, port)))
    return [SPARK / "bin" / "spark-shell"]


def java(folder: Path, port: int) -> list[str | Path]:
    """Compile the page's job; return the command that runs it."""
    lines = printed("java", folder, port).splitlines()
    imports = [line for line in lines if line.startswith("import ")]
    statements = [line for line in lines if not line.startswith("import ")]
    source = JAVA.read_text().replace("// IMPORTS", "\n".join(imports)).replace("// STATEMENTS", "\n".join(statements))
    (folder / JAVA.name).write_text(source)
    (folder / TYPED).touch()
    bin_ = Path(os.environ["JAVA_HOME"]) / "bin"
    path = f"{SPARK / 'jars'}/*{os.pathsep}{JAR}"
    subprocess.run([bin_ / "javac", "-cp", path, "-d", folder / "classes", folder / JAVA.name], check=True)
    subprocess.run([bin_ / "jar", "cf", folder / "job.jar", "-C", folder / "classes", "."], check=True)
    return [SPARK / "bin" / "spark-submit", "--class", JAVA.stem, folder / "job.jar"]


@pytest.mark.parametrize("program", [scala, java])
def test_rows_of_jvm_job_are_readable_before_their_commit(
    endpoint: sparkis.ServedEndpoint, client: redis.Redis, attached: Attach, tmp_path: Path, program: Program
) -> None:
    command, *rest = program(tmp_path, endpoint.port)
    settings = [word for name, value in OPTIONS.items() for word in ("--conf", f"{name}={value}")]
    with (
        (tmp_path / TYPED).open() as typed,
        (tmp_path / "printed").open("w") as output,
        subprocess.Popen(
            [command, "--master", "local[4]", "--jars", JAR, *settings, *rest],
            cwd=tmp_path,
            env=os.environ | {"SPARK_HOME": str(SPARK)},
            stdin=typed,
            stdout=output,
            stderr=subprocess.STDOUT,
        ) as job,
        redis.Redis(port=endpoint.port, decode_responses=True, single_connection_client=True) as committed,
    ):
        try:
            commits = tmp_path / "checkpoints" / "shop" / "commits"
            eventually(lambda: list(commits.glob("[0-9]*")) or job.poll() is not None)
            assert job.poll() is None, (tmp_path / "printed").read_text()
            attached(checkpoint=commits.parent, job="shop", state="orders", key="customer", value=["count", "max"])
            committed.execute_command("STATE", "FRESHNESS", "COMMITTED")

            def is_ahead() -> bool:
                """Return whether a value is readable that no commit has."""
                try:
                    newest, confirmed = (each.hget("shop:orders:0", "count") for each in (client, committed))
                except redis.BusyLoadingError:  # the server opens the job
                    return False
                return confirmed is not None and int(newest or 0) > int(confirmed)

            eventually(is_ahead, bool, processes=[job])
        finally:
            (tmp_path / "stop").touch()
            job.kill()
