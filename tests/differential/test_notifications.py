"""Keyspace notifications: the changes of an epoch have the events of the Redis commands that do the same."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from compat.conformance.servers import CONTROL_TOKEN, Running, redis_server, sparkis_server, wait_for_keys
from compat.conformance.wire import Connection
from state_backend.codec import packed_list, packed_map
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

STATES = (
    StateDescriptor("text", key="key", value="value"),
    StateDescriptor("map", key="key", value="value", field="field"),
    StateDescriptor("list", key="key", value="value", kind="list", length_max=4),
    StateDescriptor("set", key="key", member="member"),
    StateDescriptor("zset", key="key", member="member", score="score"),
)
ALL = "KEAn"
LATER_MS = 4_102_444_800_000
FIELDS_OF_LARGE_MAP = packed_map.FIELDS_MAX + 1  # fields, or members, that are a record each


class Job:
    """A job that is published to without Spark, and the server that serves it."""

    def __init__(self, writer: LogWriter, server: Running) -> None:
        self.writer = writer
        self.server = server
        self._control = Connection(server.control_port)
        self._control.call("AUTH", CONTROL_TOKEN)

    def publish(self, changes: Sequence[Change], replaces: Sequence[str] = ()) -> None:
        epoch = self.writer.publish(changes, replaces=replaces)
        self._control.call("NOTICE", "job", epoch)
        assert self._control.call("WAIT", "job", epoch, 10_000).value == 1


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    log = tmp_path_factory.mktemp("log")
    with LogWriter(log, "job", STATES) as writer:
        writer.publish([Change("text", Op.PUT, b"job:text:first", value=b"1")])
        options = ("--notify-keyspace-events", ALL)
        with sparkis_server(tmp_path_factory.mktemp("store"), log, *options) as server:
            wait_for_keys(server, 1)
            yield Job(writer, server)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with redis_server(tmp_path_factory.mktemp("redis"), "--notify-keyspace-events", ALL) as server:
        yield server


def put(state: str, key: str, value: bytes | str = b"", field: str | None = None, at_ms: int | None = None) -> Change:
    text = value.encode() if isinstance(value, str) else value
    return Change(state, Op.PUT, b"job:%b" % key.encode(), field and field.encode(), text, at_ms)  # type: ignore[arg-type]


def delete(state: str, key: str, field: str | None = None) -> Change:
    return Change(state, Op.DELETE, b"job:%b" % key.encode(), field and field.encode())  # type: ignore[arg-type]


def append(key: str, *elements: str) -> list[Change]:
    return [Change("list", Op.APPEND, b"job:%b" % key.encode(), value=each.encode()) for each in elements]


MANY = [f"f{number}" for number in range(FIELDS_OF_LARGE_MAP)]
MANY_WORDS = " ".join(f"{each} 1" for each in MANY)

# Each step: an epoch's changes, and the commands that do the same to the same keys.
STEPS: dict[str, list[tuple[list[Change], list[str]]]] = {
    "values": [
        ([put("text", "a", "1")], ["SET job:a 1"]),
        ([put("text", "a", "2"), put("text", "b", "1")], ["SET job:b 1", "SET job:a 2"]),
        ([put("text", "b", "1")], []),
        ([put("text", "b", "3", at_ms=LATER_MS)], [f"SET job:b 3 PXAT {LATER_MS}"]),
        ([put("text", "b", "3")], ["SET job:b 3"]),
        ([put("text", "c", "x", at_ms=LATER_MS)], [f"SET job:c x PXAT {LATER_MS}"]),
        ([delete("text", "a"), delete("text", "nothing")], ["DEL job:a", "DEL job:nothing"]),
        ([put("text", "long", "x" * 200_000)], ["SET job:long " + "x" * 200_000]),
        ([put("text", "long", "y" * 200_000)], ["SET job:long " + "y" * 200_000]),
        ([delete("text", "long")], ["DEL job:long"]),
        ([delete("text", "b")], ["DEL job:b"]),
        ([delete("text", "c")], ["DEL job:c"]),
    ],
    "maps": [
        ([put("map", "h", "1", "x"), put("map", "h", "1", "y")], ["HSET job:h x 1 y 1"]),
        ([put("map", "h", "1", "x"), put("map", "h", "2", "y")], ["HSET job:h y 2"]),
        ([put("map", "h", "2", "y")], []),
        ([delete("map", "h", "x"), delete("map", "h", "z")], ["HDEL job:h x z"]),
        ([put("map", "h", "3", "z"), delete("map", "h", "y")], ["HSET job:h z 3", "HDEL job:h y"]),
        ([delete("map", "h", "z")], ["HDEL job:h z"]),
        ([put("map", "h", packed_map.pack([(b"a", b"1"), (b"b", b"2")]))], ["HSET job:h a 1 b 2"]),
        ([put("map", "h", packed_map.pack([(b"a", b"1"), (b"b", b"3")]))], ["HSET job:h b 3"]),
        ([put("map", "h", packed_map.pack([(b"c", b"1")]))], ["HSET job:h c 1", "HDEL job:h a b"]),
        (
            [put("map", "h", packed_map.pack([(b"c", b"1")]), at_ms=LATER_MS)],
            [f"PEXPIREAT job:h {LATER_MS}"],
        ),
        ([put("map", "h", packed_map.pack([(b"c", b"1")]))], ["PERSIST job:h"]),
        ([delete("map", "h")], ["DEL job:h"]),
    ],
    "large maps": [
        ([put("map", "l", "1", each) for each in MANY], [f"HSET job:l {MANY_WORDS}"]),
        ([put("map", "l", "1", MANY[3])], []),
        ([put("map", "l", "2", MANY[3]), delete("map", "l", "none")], [f"HSET job:l {MANY[3]} 2"]),
        ([delete("map", "l", MANY[4])], [f"HDEL job:l {MANY[4]}"]),
        ([put("map", "l", packed_map.pack([(b"c", b"1")]))], ["HSET job:l c 1", "HDEL job:l " + " ".join(MANY)]),
        ([delete("map", "l")], ["DEL job:l"]),
    ],
    "lists": [
        (append("q", "1", "2"), ["RPUSH job:q 1 2"]),
        (append("q", "3"), ["RPUSH job:q 3"]),
        (append("q", "4", "5"), ["RPUSH job:q 4 5", "LTRIM job:q -4 -1"]),
        ([put("list", "q", packed_list.pack([b"x", b"y"]))], ["DEL job:q", "RPUSH job:q x y"]),
        ([delete("list", "q"), *append("q", "z")], ["DEL job:q", "RPUSH job:q z"]),
        ([delete("list", "q")], ["DEL job:q"]),
    ],
    "sets": [
        ([put("set", "s", field="a"), put("set", "s", field="b")], ["SADD job:s a b"]),
        ([put("set", "s", field="a")], []),
        ([put("set", "s", field="c"), delete("set", "s", "a")], ["SADD job:s c", "SREM job:s a"]),
        ([delete("set", "s", "b"), delete("set", "s", "c")], ["SREM job:s b c"]),
        ([put("set", "s", field=each) for each in MANY], ["SADD job:s " + " ".join(MANY)]),
        ([delete("set", "s", MANY[1]), put("set", "s", field=MANY[2])], [f"SREM job:s {MANY[1]}"]),
        ([put("set", "s", packed_list.pack([b"one"]))], ["SADD job:s one", "SREM job:s " + " ".join(MANY)]),
        ([delete("set", "s")], ["DEL job:s"]),
    ],
    "sorted sets": [
        ([put("zset", "z", "1", "a"), put("zset", "z", "2", "b")], ["ZADD job:z 1 a 2 b"]),
        ([put("zset", "z", "1", "a")], []),
        ([put("zset", "z", "5", "a"), delete("zset", "z", "b")], ["ZADD job:z 5 a", "ZREM job:z b"]),
        ([delete("zset", "z", "a")], ["ZREM job:z a"]),
        ([put("zset", "z", "1", each) for each in MANY], ["ZADD job:z " + " ".join(f"1 {each}" for each in MANY)]),
        ([put("zset", "z", "1", MANY[1])], []),
        ([put("zset", "z", "7", MANY[1])], [f"ZADD job:z 7 {MANY[1]}"]),
        ([delete("zset", "z", MANY[5])], [f"ZREM job:z {MANY[5]}"]),
        ([delete("zset", "z")], ["DEL job:z"]),
    ],
}


class Listener:
    """A subscriber to all notifications, of either server."""

    def __init__(self, port: int, greeting: str) -> None:
        self._connection = Connection(port)
        if greeting:
            self._connection.call("HELLO", greeting)
        self._connection.call("PSUBSCRIBE", "__key*__:*")

    def received(self, end: bytes) -> list[bytes]:
        """Return the messages, as they were sent, before the last one about a key; those of one key lie together."""
        found: list[bytes] = []
        while True:
            reply = self._connection.read()
            if reply.value[3].value == end and reply.value[2].value.endswith(b":del"):
                return found
            if end not in reply.value[2].value and reply.value[3].value != end:
                found.append(reply.raw)

    def close(self) -> None:
        self._connection.__exit__()


@pytest.mark.parametrize("greeting", ["", "3"], ids=["RESP2", "RESP3"])
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_changes_of_epoch_have_notifications_of_redis(
    job: Job, redis: Running, steps: Sequence[tuple[list[Change], list[str]]], greeting: str
) -> None:
    ours, theirs = Listener(job.server.port, greeting), Listener(redis.port, greeting)
    with Connection(redis.port) as commands:
        for number, (changes, lines) in enumerate(steps):
            end = f"end-{number}"
            job.publish(changes)
            job.publish([put("text", end, "1")])
            job.publish([delete("text", end)])
            for line in [*lines, f"SET job:{end} 1", f"DEL job:{end}"]:
                assert not commands.call(*line.split(" ")).is_error, line
            received = [listener.received(f"job:{end}".encode()) for listener in (ours, theirs)]
            assert received[0] == received[1], lines
    ours.close()
    theirs.close()


def soon_ms() -> int:
    """Return when something expires that is published now: not before that is done, also on a busy machine."""
    return int(time.time() * 1000) + 3_000


def test_expired_key_is_notified_when_it_is_removed(job: Job, redis: Running) -> None:
    at_ms = soon_ms()
    ours, theirs = Listener(job.server.port, ""), Listener(redis.port, "")
    job.publish([put("text", "soon", "1", at_ms=at_ms)])
    with Connection(redis.port) as commands:
        commands.call("SET", "job:soon", "1", "PXAT", at_ms)
    messages = []
    for listener in (ours, theirs):
        received: list[bytes] = []
        while not received or b"__keyevent@0__:expired" not in received[-1]:
            received.append(listener._connection.read().raw)
        messages.append(received)
        listener.close()
    assert messages[0] == messages[1]


def test_expired_field_is_notified_and_with_last_one_its_key(job: Job) -> None:
    ours = Listener(job.server.port, "")
    at_ms = soon_ms()
    job.publish([put("map", "brief", "1", "x", at_ms=at_ms), put("map", "brief", "1", "y", at_ms=at_ms)])
    received: list[bytes] = []
    while not received or received[-1] != b"del":
        channel, text = ours._connection.read().plain[2:]
        if channel == b"__keyspace@0__:job:brief":
            received.append(text)
    assert received == [b"new", b"hset", b"hexpire", b"hexpired", b"del"]
    ours.close()


def test_keys_missing_from_replaced_state_are_notified_as_deleted(job: Job) -> None:
    job.publish([put("text", "one", "1"), put("text", "two", "2"), put("text", "first", "1")])
    ours = Listener(job.server.port, "")
    job.publish([put("text", "two", "2"), put("text", "three", "3")], replaces=["text"])
    received = set()
    while not {b"one", b"three"} <= {key for key, _ in received}:
        channel, text = ours._connection.read().plain[2:]
        if channel.startswith(b"__keyspace@0__:job:") and text != b"new":
            received.add((channel.removeprefix(b"__keyspace@0__:job:"), text))
    assert (b"one", b"del") in received
    assert (b"three", b"set") in received
    assert b"two" not in {key for key, _ in received}
    ours.close()


@pytest.mark.parametrize("letters", ["", "K", "KEA", "AKE", "xEg", "KE$lshzxetdmng", "An", "Kn", "EmA", "KEx!", "q"])
def test_classes_are_read_back_as_by_redis(job: Job, redis: Running, letters: str) -> None:
    answers = []
    for server in (redis, job.server):
        with Connection(server.port) as connection:
            set_ = connection.call("CONFIG", "SET", "notify-keyspace-events", letters).raw
            answers.append((set_, connection.call("CONFIG", "GET", "notify-keyspace-events").raw))
            connection.call("CONFIG", "SET", "notify-keyspace-events", ALL)
    assert answers[1] == answers[0]


def test_only_enabled_classes_are_notified(job: Job) -> None:
    with Connection(job.server.port) as connection:
        connection.call("CONFIG", "SET", "notify-keyspace-events", "Eg")
        ours = Listener(job.server.port, "")
        job.publish([put("text", "some", "1", at_ms=LATER_MS)])
        job.publish([delete("text", "some")])
        received = [ours._connection.read().plain[2] for _ in range(2)]
        assert received == [b"__keyevent@0__:expire", b"__keyevent@0__:del"]
        connection.call("CONFIG", "SET", "notify-keyspace-events", ALL)
    ours.close()


def test_channel_of_job_has_each_epoch_once_it_is_readable(job: Job) -> None:
    with Connection(job.server.port) as listener, Connection(job.server.port) as reader:
        listener.call("SUBSCRIBE", "__sparkis__:epoch:job")
        for number in range(5):
            job.publish([put("text", "counter", str(number))])
            received = listener.read().plain
            assert received[:2] == [b"message", b"__sparkis__:epoch:job"]
            pattern = rb'\{"job": "job", "term": 1, "epoch": \d+\}'
            assert re.fullmatch(pattern, received[2])
            assert int(reader.call("GET", "job:counter").value) >= number
        refused = reader.call("PUBLISH", "__sparkis__:epoch:job", "x")
        assert refused.value == b"ERR channels that begin with __sparkis__: are the server's own"


def test_no_notification_precedes_readable_change(job: Job, tmp_path: Path) -> None:
    with Connection(job.server.port) as listener, Connection(job.server.port) as reader:
        listener.call("SUBSCRIBE", "__keyspace@0__:job:ordered")
        for number in range(1, 30):
            job.publish([put("text", "ordered", str(number))])
        for seen in range(1, 30):
            while listener.read().plain[2] != b"set":
                pass
            assert int(reader.call("GET", "job:ordered").value) >= seen
