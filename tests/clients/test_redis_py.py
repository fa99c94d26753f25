"""redis-py, with its default settings unless a test says otherwise, in RESP2 and RESP3."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from compat.conformance.dataset import LATER_MS, Dataset
from compat.conformance.servers import Running

# The default waits some seconds between its tries: nothing to test here.
NO_RETRY = {"retry": Retry(NoBackoff(), 0)}


@pytest.fixture(params=[None, 2, 3], ids=["default", "RESP2", "RESP3"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    """The protocol version: as redis-py chooses it, or given."""
    return {} if request.param is None else {"protocol": request.param}


@pytest.fixture
def client(sparkis: Running, settings: dict[str, Any]) -> Iterator[redis.Redis]:
    """A client."""
    with redis.Redis(port=sparkis.port, **settings) as made:
        yield made


def test_values_are_read(client: redis.Redis, dataset: Dataset) -> None:
    assert {key: client.get(key) for key in dataset.strings} == dataset.strings
    assert client.mget(list(dataset.strings)) == list(dataset.strings.values())
    assert client.mget("plain", "missing", "hash:one") == [b"value", None, None]
    assert (client.get("missing"), client.strlen("big"), client.getrange("plain", 1, 2)) == (None, 65536, b"al")


def test_maps_are_read(client: redis.Redis, dataset: Dataset) -> None:
    assert {key: client.hgetall(key) for key in dataset.hashes} == dataset.hashes
    assert client.hgetall("missing") == {}
    assert client.hmget("hash:one", "field", "missing") == [b"value", None]
    assert (client.hget("hash:one", "field"), client.hlen("hash:large"), client.hexists("hash:one", "x")) == (
        b"value",
        1500,
        False,
    )
    assert set(client.hkeys("hash:small")) == set(dataset.hashes[b"hash:small"])
    assert sorted(client.hvals("hash:small")) == sorted(dataset.hashes[b"hash:small"].values())


def test_lists_are_read(client: redis.Redis, dataset: Dataset) -> None:
    assert {key: client.lrange(key, 0, -1) for key in dataset.lists} == dataset.lists
    assert (client.llen("list:long"), client.lindex("list:short", -1), client.lpos("list:short", "c")) == (
        1500,
        b"b",
        3,
    )


def test_scans_find_everything(client: redis.Redis, dataset: Dataset) -> None:
    assert sorted(client.scan_iter()) == sorted(dataset.keys)
    assert sorted(client.scan_iter(match="user:*", count=1000)) == [b"user:1:name", b"user:2:name"]
    assert set(client.scan_iter(_type="HASH")) == set(dataset.hashes)
    assert dict(client.hscan_iter("hash:large")) == dataset.hashes[b"hash:large"]
    assert set(client.hscan_iter("hash:large", no_values=True)) == set(dataset.hashes[b"hash:large"])
    assert sorted(client.keys("{tag}*")) == sorted(key for key in dataset.keys if key.startswith(b"{tag}"))


def test_times_of_expiry_are_readable(client: redis.Redis) -> None:
    assert (client.ttl("plain"), client.ttl("missing"), client.pttl("plain")) == (-1, -2, -1)
    assert (client.expiretime("later"), client.pexpiretime("later")) == (LATER_MS // 1000, LATER_MS)
    assert 0 < client.ttl("later") < LATER_MS // 1000


def test_server_describes_itself(client: redis.Redis, dataset: Dataset) -> None:
    assert client.ping()
    assert client.echo("x") == b"x"
    assert client.dbsize() == len(dataset.keys)
    assert client.info()["redis_version"] == "7.4.0"
    assert client.info("keyspace")["db0"]["keys"] == len(dataset.keys)
    assert client.config_get("maxmemory*")["maxmemory"] == "0"
    assert client.role()[0] in ("master", b"master")
    assert client.command_count() > 240
    assert "get" in client.command()
    assert client.type("hash:one") in ("hash", b"hash")
    assert client.exists("plain", "missing", "plain") == 2
    assert client.randomkey() in dataset.keys
    assert len(client.time()) == 2


def test_redis_py_sets_its_library_name(client: redis.Redis) -> None:
    assert client.client_info()["lib-name"].startswith("redis-py")
    assert any(each["lib-name"].startswith("redis-py") for each in client.client_list())


def test_connection_has_name_it_was_given(sparkis: Running, settings: dict[str, Any]) -> None:
    with redis.Redis(port=sparkis.port, client_name="a-name", **settings) as client:
        assert client.client_getname() in ("a-name", b"a-name")
        assert client.client_setname("another")
        assert client.client_getname() in ("another", b"another")


def test_texts_are_decoded(sparkis: Running, settings: dict[str, Any]) -> None:
    with redis.Redis(port=sparkis.port, decode_responses=True, **settings) as client:
        assert client.get("utf8:schlüssel") == "žluťoučký kůň 🐎"
        assert client.hgetall("hash:one") == {"field": "value"}
        assert client.type("hash:one") == "hash"
        assert list(client.scan_iter("user:1*")) == ["user:1:name"]


def test_pipeline_answers_in_order(client: redis.Redis) -> None:
    pipeline = client.pipeline(transaction=False)
    pipeline.get("plain").hgetall("hash:one").mget("number", "missing").exists("plain").ttl("plain")
    assert pipeline.execute() == [b"value", {b"field": b"value"}, [b"42", None], 1, -1]


def test_transaction_answers_in_order(client: redis.Redis) -> None:
    pipeline = client.pipeline()
    pipeline.watch("plain", "hash:one", "missing")
    assert pipeline.get("plain") == b"value"
    pipeline.multi()
    pipeline.get("plain").hgetall("hash:one").mget("number", "missing").lrange("list:one", 0, -1)
    assert pipeline.execute() == [b"value", {b"field": b"value"}, [b"42", None], [b"only"]]
    with pytest.raises(redis.exceptions.ReadOnlyError):
        client.pipeline().get("plain").set("plain", "x").execute()
    assert client.get("plain") == b"value"


def test_error_in_pipeline_stays_in_its_place(client: redis.Redis) -> None:
    pipeline = client.pipeline(transaction=False).get("plain").get("hash:one").set("plain", "x").get("empty")
    first, second, third, last = pipeline.execute(raise_on_error=False)
    assert (first, last) == (b"value", b"")
    assert "wrong kind of value" in str(second)
    assert isinstance(third, redis.exceptions.ReadOnlyError)


def test_large_pipeline_is_answered_whole(client: redis.Redis) -> None:
    pipeline = client.pipeline(transaction=False)
    for number in range(3000):
        pipeline.get(b"many:%03d" % (number % 300))
    assert pipeline.execute() == [b"%d" % (number % 300) for number in range(3000)]


@pytest.mark.parametrize("write", [["SET", "a", "b"], ["DEL", "plain"], ["HSET", "hash:one", "a", "b"], ["FLUSHALL"]])
def test_write_is_refused_and_connection_continues(client: redis.Redis, write: list[str]) -> None:
    with pytest.raises(redis.exceptions.ReadOnlyError):
        client.execute_command(*write)
    assert client.get("plain") == b"value"


def test_wrong_type_is_error(client: redis.Redis) -> None:
    with pytest.raises(redis.exceptions.ResponseError, match="wrong kind of value"):
        client.get("hash:one")


def test_other_databases_are_empty(sparkis: Running, settings: dict[str, Any]) -> None:
    with redis.Redis(port=sparkis.port, db=1, **settings) as client:
        assert (client.get("plain"), client.dbsize(), client.keys()) == (None, 0, [])


def test_url_connects(sparkis: Running) -> None:
    with redis.Redis.from_url(f"redis://localhost:{sparkis.port}/0?decode_responses=True") as client:
        assert client.get("plain") == "value"


def test_health_check_passes(sparkis: Running, settings: dict[str, Any]) -> None:
    with redis.Redis(port=sparkis.port, health_check_interval=0.000_001, **settings) as client:
        assert [client.get("plain") for _ in range(3)] == [b"value"] * 3


def test_right_password_is_accepted(locked_sparkis: Running, settings: dict[str, Any]) -> None:
    for user in (None, "default"):
        with redis.Redis(
            port=locked_sparkis.port, username=user, password=locked_sparkis.password, **settings
        ) as client:
            assert client.get("plain") == b"value"


def test_wrong_password_is_refused(locked_sparkis: Running, settings: dict[str, Any]) -> None:
    for given in ({"password": "wrong"}, {}):
        with (
            redis.Redis(port=locked_sparkis.port, **given, **NO_RETRY, **settings) as client,
            pytest.raises(redis.exceptions.AuthenticationError),
        ):
            client.get("plain")


def test_pool_connects_again_after_restart(restartable: Any, settings: dict[str, Any]) -> None:
    with redis.Redis(port=restartable.port, **settings) as client:
        assert client.get("plain") == b"value"
        restartable.restart()
        assert client.get("plain") == b"value"


def test_server_that_is_gone_is_connection_error(restartable: Any, settings: dict[str, Any]) -> None:
    with redis.Redis(port=restartable.port, **NO_RETRY, **settings) as client:
        client.get("plain")
        restartable.stop()
        with pytest.raises(redis.exceptions.ConnectionError):
            client.get("plain")


def test_several_threads_share_pool(client: redis.Redis) -> None:
    with ThreadPoolExecutor(8) as threads:
        values = list(threads.map(lambda number: client.get(b"many:%03d" % number), range(300)))
    assert values == [b"%d" % number for number in range(300)]


def test_clients_of_all_workers_are_listed_and_can_be_killed(
    several_workers: Running, settings: dict[str, Any]
) -> None:
    clients = [
        redis.Redis(port=several_workers.port, client_name=f"client-{number}", **NO_RETRY, **settings)
        for number in range(4)
    ]
    ids = [client.client_id() for client in clients]
    assert ids == sorted(set(ids))
    for client in clients:
        listed = {int(each["id"]): each["name"] for each in client.client_list()}
        assert {each: listed[each] for each in ids} == {each: f"client-{at}" for at, each in enumerate(ids)}
        assert [each["id"] for each in client.client_list(client_id=ids[2:])] == [str(each) for each in ids[2:]]
    address = clients[2].client_info()["addr"]
    assert clients[0].client_kill_filter(_id=ids[1]) == 1
    assert clients[0].client_kill(address) is True
    assert {int(each["id"]) for each in clients[3].client_list()} & set(ids) == {ids[0], ids[3]}
    for killed in clients[1:3]:  # it connects again by itself
        assert killed.client_id() > ids[-1]
    assert clients[0].info("clients")["connected_clients"] >= 2
    for client in clients:
        client.close()
