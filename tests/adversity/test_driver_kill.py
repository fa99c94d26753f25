"""Whatever is killed, and whenever: no epoch is lost, doubled, torn or seen early, and the job goes on."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from time import sleep

import pytest

from compat.waiting import eventually
from tests.adversity.driver import JOB
from tests.adversity.scene import Process, Scene

pytestmark = [pytest.mark.kill, pytest.mark.spark]

ROUNDS = int(os.environ.get("SPARKIS_KILL_ROUNDS") or 2)
# Every so many rounds the driver itself is killed, which takes a new JVM; in between its children are.
ROUNDS_PER_DRIVER = 2
VICTIMS = ("pyspark.daemon", "resp_server.programs.serve", "state_backend.apply.applier")


def kill_a_child(scene: Scene, driver: Process) -> str:
    """Kill a random Python worker, server or applier of a driver; return which."""
    victim = scene.random.choice(VICTIMS)
    found = eventually(lambda: driver.children(victim), bool)
    os.kill(scene.random.choice(found), signal.SIGKILL)
    return victim


def kill_the_driver(scene: Scene, driver: Process) -> str:
    """Kill the driver: its process alone, whose JVM then notices, or all of it at once."""
    if scene.random.random() < 0.5:
        driver.kill()
        return "driver and JVM"
    (jvm,) = driver.children("org.apache.spark.deploy.SparkSubmit")
    os.kill(driver.popen.pid, signal.SIGKILL)
    driver.popen.wait()
    eventually(lambda: Path(f"/proc/{jvm}").exists(), lambda is_there: not is_there)
    return "driver"


# Who counts the rows: Spark, or a reducing state, which shows an epoch that counts twice. In few rounds the latter.
by = pytest.mark.parametrize("reduces", [True, False] if ROUNDS > 2 else [True])


@pytest.mark.slow
@by
def test_driver_killed_at_random_moments_loses_no_epoch(scene: Scene, reduces: bool):
    scene.reduces = reduces
    scene.add_files(2)
    orders = {"port": scene.port, "store": str(scene.folder / "store")}
    driver = scene.start_driver(**orders)
    driver.wait_for("ready")
    watcher = scene.watch()
    killed = []
    for number in range(1, ROUNDS + 1):
        scene.add_files(4)
        scene.wait_for_one_more()
        sleep(scene.random.random())
        if number % ROUNDS_PER_DRIVER:
            killed.append(kill_a_child(scene, driver))
        else:
            killed.append(kill_the_driver(scene, driver))
            driver = scene.start_driver(**orders)
        scene.add_files(3)
        scene.wait_for_all()
    watcher.stop()
    assert scene.epochs() == list(range(scene.committed() + 1)), killed
    assert len(watcher.seen) > ROUNDS


# A batch that ends before its commit is also in `test_batches.py`: the log is out of reach.
@pytest.mark.parametrize("dies_first", [False, pytest.param(True, marks=pytest.mark.slow)])
@by
def test_driver_killed_around_commit_loses_and_repeats_no_epoch(scene: Scene, reduces: bool, dies_first: bool):
    scene.reduces = reduces
    server = scene.start_server()
    watcher = scene.watch()
    scene.add_files(3)

    if dies_first:
        dies_before = scene.start_driver(dies=("before", 1))
        assert dies_before.popen.wait(90) == 9
        assert scene.epochs() == [0]

    dies_after = scene.start_driver(dies=("after", 1))
    assert dies_after.popen.wait(90) == 9
    assert scene.epochs() == [0, 1]
    first = scene.epoch(1)
    assert not (scene.checkpoint / "commits" / "1").exists()  # Spark holds that this batch is not done

    scene.start_driver()
    scene.add_files(3)
    scene.wait_for_all()
    assert scene.epoch(1) == first
    assert scene.epochs() == list(range(6))
    assert server.popen.poll() is None
    watcher.stop()
    assert all(count in watcher.seen for count in (1, 2))


@pytest.mark.slow
def test_older_of_two_drivers_on_copies_of_checkpoint_is_fenced(scene: Scene):
    scene.start_server()
    scene.add_files(2)
    older = scene.start_driver()
    eventually(scene.committed, lambda epoch: epoch == 1)
    eventually(lambda: (scene.checkpoint / "commits" / "1").exists(), bool)
    copy = scene.folder / "copy"
    shutil.copytree(scene.checkpoint, copy)
    refused = scene.start_driver(checkpoint=copy).wait_for("failed")
    assert f"job '{JOB}' in the log {scene.log} is being written by query" in refused
    newer = scene.start_driver(checkpoint=copy, takeover=True)
    newer.wait_for("ready")
    scene.add_files(1)
    message = older.wait_for("failed")
    assert f"job '{JOB}' in the log {scene.log} is now written by query" in message
    assert "two drivers on one checkpoint" in message
    scene.add_files(3)
    scene.wait_for_all()
    assert scene.epochs() == list(range(6))
    assert newer.popen.poll() is None
