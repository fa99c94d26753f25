"""The state clusters behind a proxy. If there are several, a key belongs to the one that has the key's job."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping

import hiredis

from resp_server.backends.servers.state_cluster import StateCluster
from resp_server.protocol.errors import GenericError, LoadingError
from resp_server.raw_replies.answers import in_background
from resp_server.raw_replies.raw_reply import as_bytes, is_error
from resp_server.raw_replies.reply_sinks import MALFORMED_REPLY_ERRORS
from resp_server.raw_replies.reply_splitter import pack

logger = logging.getLogger("sparkis.proxy")

JOBS = pack((b"STATE", b"JOBS"))


class StateClusters(tuple[StateCluster, ...]):
    """All state clusters, in configured order; a SCAN cursor contains the index of a cluster.

    Attributes:
        single: The cluster, if there is just one.
        on_key_formats: Is called with the key formats of each job's states.
    """

    def __new__(cls, clusters: Iterable[StateCluster], *, needs_key_formats: bool = False) -> StateClusters:
        return super().__new__(cls, clusters)

    def __init__(self, clusters: Iterable[StateCluster], *, needs_key_formats: bool = False) -> None:
        # A single cluster needs key formats only to distinguish its keys from an upstream's.
        self._needs_key_formats = needs_key_formats or len(self) > 1
        self.on_key_formats: Callable[[Mapping[str, Mapping[str, str]]], None] = lambda formats: None
        self.single = self[0] if len(self) == 1 else None
        self._clashes: set[tuple[str, str, str]] = set()
        self._retrying: set[tuple[str, str]] = set()  # (cluster, address) with a scheduled retry

    def start(self) -> None:
        """Start the connections to all clusters."""
        for cluster in self:
            if self._needs_key_formats:
                cluster.on_new_job = self.request_key_formats
            cluster.start()

    def follow_keys(self, is_on: bool) -> None:
        """Have all servers report changed keys, or stop it."""
        for cluster in self:
            cluster.follow_keys(is_on)

    def when_followed(self, then: Callable[[], None]) -> None:
        """Call back once all connected servers have answered `follow_keys`."""
        in_background(self._followed(then))

    async def _followed(self, then: Callable[[], None]) -> None:
        for cluster in self:
            await cluster.followed()
        then()

    def stop(self) -> None:
        """Close all connections."""
        for cluster in self:
            cluster.stop()

    @property
    def has_key_formats(self) -> bool:
        """Return whether the key formats of all jobs are known."""
        return all(cluster.keys.is_complete for cluster in self)

    def info_fields(self) -> Mapping[str, object]:
        """Return the fields for INFO; with several clusters, each name begins with the number of its cluster."""
        if self.single is not None:
            return self.single.info_fields()
        return {
            f"application{number}_{name}": value
            for number, each in enumerate(self)
            for name, value in ({"name": each.name} | dict(each.info_fields())).items()
        }

    def of(self, key: bytes) -> StateCluster:
        """Return a key's cluster; LoadingError if it is not known yet, GenericError if two clusters match."""
        if self.single is not None:
            return self.single
        found = [(cluster, job) for cluster in self if (job := cluster.keys.job_of(key)) is not None]
        if len(found) == 1:
            return found[0][0]
        if found:
            (one, job), (other, its_job) = found[:2]
            raise GenericError(clash(one, job, other, its_job))
        for cluster in self:
            if not cluster.keys.is_complete:
                raise LoadingError(f"the jobs of {cluster.name} are not known yet; retry in a moment")
        return self[0]  # no job has this key, so any cluster can reply that it does not exist

    def with_job(self, job: str) -> list[StateCluster]:
        """Return the clusters that have a job of this name."""
        return [cluster for cluster in self if job in cluster.keys.names]

    def request_key_formats(self, cluster: StateCluster, address: str) -> None:
        """Request the key formats of a server's jobs."""
        for job in cluster.keys.names:
            for other in self.with_job(job):
                self._log_clash_once(cluster, other, job)
        in_background(self._learn_key_formats(cluster, address))

    async def _learn_key_formats(self, cluster: StateCluster, address: str) -> None:
        reply = as_bytes((await cluster.ask(address, JOBS, is_long=True)).reply)
        if is_error(reply):
            logger.warning("%s refused to list its jobs: %s", address, reply[1:200].decode("utf-8", "replace"))
            await self._retry_key_formats(cluster, address)
            return
        try:
            formats = formats_in(reply)
            cluster.keys.set_formats({job: list(states.values()) for job, states in formats.items()})
            self.on_key_formats(formats)
        except MALFORMED_REPLY_ERRORS as error:
            logger.warning("%s listed its jobs in an unexpected form: %s", address, error)

    async def _retry_key_formats(self, cluster: StateCluster, address: str) -> None:
        """After an error, request a server's key formats again soon, if it still belongs to the cluster."""
        row = (cluster.name, address)
        if row in self._retrying:
            return
        self._retrying.add(row)
        try:
            has_paused = await cluster.pause(math.inf)
        finally:
            self._retrying.discard(row)
        if has_paused and cluster.has_server(address):
            self.request_key_formats(cluster, address)

    def _log_clash_once(self, one: StateCluster, other: StateCluster, job: str) -> None:
        row = (job, *sorted((one.name, other.name)))
        if one is not other and row not in self._clashes:
            self._clashes.add((row[0], row[1], row[2]))
            logger.error("%s", clash(one, job, other, job))


def clash(one: StateCluster, job: str, other: StateCluster, its_job: str) -> str:
    """Return the error text for a key that two clusters match."""
    if job == its_job:
        return f"job '{job}' is in {one.name} and in {other.name}: its keys are not served; rename one of the two jobs"
    return (
        f"the key could be of job '{job}' in {one.name} and of job '{its_job}' in {other.name}: change the key format "
        "of one of them"
    )


def formats_in(reply: bytes) -> dict[str, dict[str, str]]:
    """Return the key formats in a reply to STATE JOBS: by job, then by state."""
    reader = hiredis.Reader(encoding="utf-8")
    reader.feed(reply)
    rows = [dict(zip(row[::2], row[1::2], strict=True)) for row in reader.gets()]
    return {row["name"]: dict(zip(row["state_names"], row["key_formats"], strict=True)) for row in rows}
