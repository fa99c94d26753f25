"""The caches of real clients, at a node of a cluster and at a proxy: they keep values, and get invalidations."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.cache import CacheConfig

from compat.conformance.servers import CONTROL_TOKEN, Running, free_port, sparkis_proxy, sparkis_server
from compat.waiting import WAIT_S_MAX, eventually
from resp_server.net.client import Client
from state_backend.model.descriptor import StateDescriptor
from state_backend.log.log_writer import LogWriter
from state_backend.model.records import Change, Op

KEYS = ("job:n:{x}a", "job:n:{x}b")


class Job:
    """A job whose values are the number of the last epoch, a server of all slots, and a proxy in front of it."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._writer = stack.enter_context(LogWriter(folder / "log", "job", [StateDescriptor("n", key="k", value="v")]))
        self._control: Client | None = None
        self._epoch = -1
        self.publish()
        port, topology = free_port(), folder / "cluster.json"
        topology.write_text(
            json.dumps({"version": 1, "nodes": [{"host": "127.0.0.1", "port": port, "slots": "0-16383"}]})
        )
        options = ("--cluster", str(topology), "--cluster-node", f"127.0.0.1:{port}")
        self.server = stack.enter_context(sparkis_server(folder / "store", folder / "log", *options, port=port))
        self._control = Client("127.0.0.1", self.server.control_port, password=CONTROL_TOKEN, timeout_s=WAIT_S_MAX)
        self.proxy = stack.enter_context(sparkis_proxy(topology, "--server-timeout", "60000"))
        with self.proxy.connect() as connection:
            eventually(lambda: connection.call("GET", KEYS[0]).value)

    def publish(self) -> None:
        """Publish an epoch that changes all keys, and have the server look."""
        self._epoch += 1
        self._writer.publish([Change("n", Op.PUT, key.encode(), value=b"%d" % self._epoch) for key in KEYS])
        if self._control is not None:
            self._control.call("NOTICE", "job", str(self._epoch))

    @property
    def now(self) -> str:
        """What is readable, or about to be."""
        return str(self._epoch)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    with ExitStack() as stack:
        yield Job(tmp_path_factory.mktemp("caching"), stack)


@pytest.fixture(params=["server", "proxy"])
def endpoint(request: pytest.FixtureRequest, job: Job) -> Running:
    running: Running = getattr(job, request.param)
    return running


def test_cache_of_redis_py_is_invalidated(job: Job, endpoint: Running) -> None:
    with redis.Redis(port=endpoint.port, protocol=3, cache_config=CacheConfig(), decode_responses=True) as client:
        eventually(lambda: client.get(KEYS[0]), lambda found: found == job.now)
        assert client.mget(KEYS) == [job.now] * 2
        cache = client.get_cache()
        assert cache is not None
        assert cache.size == 2
        calls = client.info("commandstats")["cmdstat_get"]["calls"]
        assert [client.get(KEYS[0]) for _ in range(20)] == [job.now] * 20
        assert client.info("commandstats")["cmdstat_get"]["calls"] == calls
        job.publish()
        eventually(lambda: client.get(KEYS[0]), lambda found: found == job.now)
        assert client.mget(KEYS) == [job.now] * 2


@pytest.mark.parametrize("script", ["node_redis.mjs", "ioredis.mjs"])
def test_cache_of_javascript_client_is_invalidated(script: str, run_script: Any, job: Job, endpoint: Running) -> None:
    before = job.now
    found = run_script(script, "caching", endpoint, KEYS[0], meanwhile=job.publish)
    assert found == {"before": [before, before], "hits": 1, "after": job.now}
