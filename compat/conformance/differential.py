"""Random commands, sent to two servers in RESP2 and RESP3, and the comparison of their replies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from compat.conformance import generators
from compat.conformance.dataset import Dataset, standard
from compat.conformance.dataset_log import dataset_writer, publish
from compat.conformance.judge import Deviations, Judge
from compat.conformance.servers import fill, redis_server, sparkis_server, wait_for_keys
from compat.conformance.wire import Connection, Words, replies_to
from compat.reference.capture import ROW_FIELDS, capture

# After this many differences of one command, the next command is tested.
DIFFERENCES_MAX = 3


@dataclass(frozen=True)
class Address:
    """The address of a server."""

    host: str
    port: int

    @classmethod
    def of(cls, text: str) -> Address:
        """Parse HOST:PORT; ValueError if it is invalid."""
        host, _, port = text.rpartition(":")
        return cls(host.strip("[]") or "127.0.0.1", int(port))


@contextmanager
def both_kinds() -> Iterator[tuple[Address, Address]]:
    """Run a real server and one of ours, with the data set."""
    dataset = standard()
    with TemporaryDirectory(prefix="sparkis-conformance-") as folder, ExitStack() as stack:
        root = Path(folder)
        (root / "redis").mkdir()
        real = stack.enter_context(redis_server(root / "redis"))
        fill(real, dataset)
        writer = stack.enter_context(dataset_writer(root / "log"))
        publish(dataset, writer)
        ours = stack.enter_context(sparkis_server(root / "store", root / "log"))
        wait_for_keys(ours, len(dataset.keys))
        yield Address("127.0.0.1", real.port), Address("127.0.0.1", ours.port)


def judge_of(left: Address, right: Address, dataset: Dataset) -> Judge:
    """Return the judge of servers with a data set; it skips rows of the command table that differ between versions."""
    tables = [capture(each.host, each.port) for each in (left, right)]
    alike = [
        name.encode()
        for name, row in tables[0].items()
        if name in tables[1]
        and all(row.get(part) == tables[1][name].get(part) for part in (*ROW_FIELDS, "subcommands"))
    ]
    with Connection(right.port, right.host) as connection:
        names = connection.call("CONFIG", "GET", "*").plain[::2]
    return Judge(Deviations.load(), frozenset(names), frozenset(alike), frozenset(dataset.keys), dataset.items)


def differences(left: Address, right: Address, examples: int) -> Iterator[tuple[str, int, list[str]]]:
    """Test each command `examples` times; yield its name, the number of sent requests, and the differences."""
    judge = judge_of(left, right, standard())
    for name in generators.SHORT_REPLIES:
        yield name, *_differences_in(name, judge, (left, right), examples)


def _differences_in(name: str, judge: Judge, both: tuple[Address, Address], examples: int) -> tuple[int, list[str]]:
    found: list[str] = []
    sent = 0

    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(data=st.data())
    def compare(data: st.DataObject) -> None:
        nonlocal sent
        if len(found) >= DIFFERENCES_MAX:
            return
        greeting: list[Words] = data.draw(st.sampled_from([[], [[b"HELLO", b"3"]]]))
        pipeline = [*greeting, *data.draw(st.lists(generators.requests(name), min_size=1, max_size=6))]
        replies = [replies_to(each.port, pipeline, each.host) for each in both]
        sent += len(pipeline)
        found.extend(judge.differences(pipeline, *replies))

    compare()
    return sent, found
