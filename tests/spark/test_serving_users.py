"""The servers of a driver have the users, rates and notifications that `serve` gets."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession

import sparkis
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net.children import SERVER_PASSWORD_VARIABLE
from spark_hooks.serving.executor_endpoint import ExecutorsEndpoint
from state_backend.model.errors import SparkisError
from tests.spark.micro_batches import Batches, Settings, start

pytestmark = pytest.mark.usefixtures("no_log_left_over")

Make = Callable[[str], Batches]
USERS = """\
user default off
user admin on >root ~* &* +@all
user tenant on >secret ~job:s:a* &* +@all -@admin -@dangerous
"""
RATE = 1_000_000


@pytest.fixture
def acl_file(tmp_path: Path) -> Path:
    path = tmp_path / "users.acl"
    path.write_text(USERS)
    return path


def publish(batches: Make, checkpoint: Path) -> Batches:
    rows = batches("k string, v int")
    rows.add({"k": "a", "v": 1}, {"k": "b", "v": 2})
    start(sparkis.queryable(rows.df, "s", key="k", value="v", mode="append"), "job", checkpoint)
    return rows


def as_user(address: str, name: str, password: str) -> redis.Redis:
    return redis.Redis.from_url(f"redis://{name}:{password}@{address}", decode_responses=True)


def answer(address: str, key: str) -> Any:
    """Return what the tenant is answered, or the error."""
    with as_user(address, "tenant", "secret") as client:
        try:
            return client.get(key)
        except redis.RedisError as error:
            return str(error)


def look_at(address: str) -> None:
    """See who is let in, and to what."""
    with redis.Redis.from_url(f"redis://{address}") as anybody, pytest.raises(redis.AuthenticationError):
        anybody.ping()
    eventually(lambda: answer(address, "job:s:a"), lambda found: found == "1")
    assert "No permissions to access a key" in answer(address, "job:s:b")
    with as_user(address, "admin", "root") as admin:
        assert admin.acl_users() == ["admin", "default", "tenant"]
        assert admin.config_get("notify-keyspace-events") == {"notify-keyspace-events": "AK"}


def options_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_text().split("\0")


def test_server_beside_driver_has_users_and_rates(spark: SparkSession, batches: Make, acl_file: Path, tmp_path: Path):
    given: dict[str, Any] = {
        "acl_file": acl_file,
        "limits": sparkis.Limits(rates=f"tenant={RATE}"),
        "notify_keyspace_events": "KA",
    }
    with sparkis.serve(spark, log=tmp_path / "log", workers=2, **given) as endpoint:
        address = endpoint.url.removeprefix("redis://")
        assert f"--rate-limit=tenant={RATE}" in options_of(endpoint.pid)  # type: ignore[attr-defined]
        rows = publish(batches, tmp_path / "checkpoint")
        look_at(address)
        with as_user(address, "tenant", "secret") as client, client.pubsub() as listener:
            listener.psubscribe("__keyspace@0__:*")
            assert listener.get_message(timeout=WAIT_S_MAX)["type"] == "psubscribe"
            for value in (3, 4):  # what is told of the first epoch comes before what is told of the second
                rows.add({"k": "b", "v": value}, {"k": "a", "v": value})
                assert listener.get_message(timeout=WAIT_S_MAX)["channel"] == "__keyspace@0__:job:s:a"  # none of b's


def test_servers_on_executors_and_proxy_have_them_by_settings(
    spark: SparkSession, batches: Make, settings: Settings, acl_file: Path, tmp_path: Path
):
    settings(
        {
            "spark.sparkis.aclFile": str(acl_file),
            "spark.sparkis.rateLimits": f"tenant={RATE},{RATE} default=1",
            "spark.sparkis.notifyKeyspaceEvents": "KA",
        }
    )
    with sparkis.serve(spark, log=tmp_path / "log", placement="executors") as endpoint:
        assert isinstance(endpoint, ExecutorsEndpoint)
        assert endpoint.password is None  # who comes is one of the file's users
        publish(batches, tmp_path / "checkpoint")
        look_at(endpoint.url.removeprefix("redis://"))
        (member,) = endpoint.members()
        look_at(member["address"])
        with as_user(member["address"], "admin", "root") as admin:
            server = int(admin.info("server")["process_id"])
        for pid in (endpoint.pids[1], server):
            assert {f"--rate-limit=tenant={RATE},{RATE}", "--rate-limit=default=1"} <= {*options_of(pid)}
            assert endpoint.plan.server_password not in options_of(pid)


def test_password_of_environment_admits_parts_to_servers_only(
    spark: SparkSession, acl_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(SERVER_PASSWORD_VARIABLE, "between us")

    def keys(address: str) -> int | str:
        with as_user(address, "default", "between us") as part:
            try:
                return part.dbsize()
            except redis.RedisError as error:
                return str(error)

    with sparkis.serve(spark, log=tmp_path / "log", placement="executors", acl_file=acl_file) as endpoint:
        assert isinstance(endpoint, ExecutorsEndpoint)
        (member,) = eventually(endpoint.members, bool)
        eventually(lambda: keys(member["address"]), lambda found: found == 0)
        assert "invalid username-password pair" in str(keys(endpoint.url.removeprefix("redis://")))


@pytest.mark.parametrize("placement", ["driver", "executors"])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"limits": sparkis.Limits(rates="tenant")}, "'tenant' is not a limit: write USER=COMMANDS"),
        ({"limits": sparkis.Limits(rates=["a=1", "a=,2"])}, "is given twice for one user"),
        ({"notify_keyspace_events": "KAy"}, "notify_keyspace_events='KAy': Invalid event class character"),
        ({"acl_file": "/nowhere"}, "opening file '/nowhere': No such file"),
        ({"acl_file": "/nowhere", "password": "x"}, "password and acl_file='/nowhere' are both given"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_started(
    spark: SparkSession, tmp_path: Path, placement: Any, given: dict[str, Any], told: str
):
    with pytest.raises((ValueError, SparkisError), match=re.escape(told)):
        sparkis.serve(spark, log=tmp_path / "log", placement=placement, **given)
