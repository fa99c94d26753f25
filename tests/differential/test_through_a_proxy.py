"""A proxy in front of three servers with a part of the slots each answers as one real server with all keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compat.conformance import generators
from compat.conformance.dataset import Dataset
from compat.conformance.generators import checked
from compat.conformance.judge import Judge
from compat.conformance.pair import Pair
from compat.conformance.servers import Running, free_port, sparkis_proxy, sparkis_server, wait_for_keys
from compat.conformance.wire import Words, scanned

SLOTS = ("0-5460", "5461-6000,12001-16383", "6001-12000")
# Of several slots they are refused, as by a cluster: there is nothing that could split them.
NOT_SPLIT = {"lcs", "sdiff", "sinter", "sintercard", "sort_ro", "sunion", "zdiff", "zinter", "zintercard", "zunion"}
OF_ONE_SLOT = [
    "SINTER {tag}set {tag}set2",
    "SUNION {tag}set {tag}set2 {tag}missing",
    "SDIFF {tag}set {tag}set2",
    "SINTERCARD 2 {tag}set {tag}set2 LIMIT 1",
    "ZUNION 3 {tag}zset {tag}zset2 {tag}set WEIGHTS 1 2 3 WITHSCORES",
    "ZINTER 2 {tag}zset {tag}zset2",
    "ZDIFF 2 {tag}zset {tag}set2 WITHSCORES",
    "ZINTERCARD 2 {tag}zset {tag}zset2",
    "LCS {tag}a {tag}b",
    "SORT_RO {tag}set ALPHA DESC LIMIT 1 2",
]
NAMES = [name for name in generators.SHORT_REPLIES if name not in NOT_SPLIT]


@pytest.fixture(scope="module")
def through(
    tmp_path_factory: pytest.TempPathFactory, dataset_log: Path, dataset: Dataset, redis_primary: Running, judge: Judge
) -> Iterator[Pair]:
    path = tmp_path_factory.mktemp("topology") / "cluster.json"
    ports = [free_port() for _ in SLOTS]
    nodes = [{"host": "127.0.0.1", "port": port, "slots": slots} for port, slots in zip(ports, SLOTS, strict=True)]
    path.write_text(json.dumps({"version": 1, "nodes": nodes}))
    with ExitStack() as stack:
        for port in ports:
            options = ("--cluster", str(path), "--cluster-node", f"127.0.0.1:{port}")
            stack.enter_context(sparkis_server(tmp_path_factory.mktemp("store"), dataset_log, *options, port=port))
        proxy = stack.enter_context(sparkis_proxy(path, "--server-timeout", "60000"))
        wait_for_keys(proxy, len(dataset.keys))
        yield Pair(redis_primary, proxy, judge)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@checked(3)
def test_command_is_answered_as_redis_answers_it(through: Pair, name: str, data: st.DataObject) -> None:
    greeting = data.draw(st.sampled_from([[], [[b"HELLO", b"3"]]]))
    through.check([*greeting, *data.draw(st.lists(generators.requests(name), min_size=1, max_size=6))])


@pytest.mark.parametrize("line", OF_ONE_SLOT)
def test_keys_of_one_slot_are_answered_together(through: Pair, line: str) -> None:
    through.check_line(line)


@pytest.mark.parametrize("line", ["SINTER set:one set:small", "ZUNION 2 zset:one zset:small", "LCS plain number"])
def test_unsplittable_request_with_keys_of_several_slots_is_crossslot(through: Pair, line: str) -> None:
    (reply,) = through.replies_to([line.encode().split()])[1]
    assert reply.raw == b"-CROSSSLOT Keys in request don't hash to the same slot\r\n"


@pytest.mark.parametrize("option", ["BY", "GET"])
def test_patterns_of_keys_that_may_be_elsewhere_are_refused(through: Pair, option: str) -> None:
    (reply,) = through.replies_to([f"SORT_RO {{tag}}zset BY x {option} hash:*".encode().split()])[1]
    assert (
        reply.raw
        == (
            f"-ERR {option} option of SORT denied in Cluster mode when keys formed by the pattern may be in different "
            "slots.\r\n"
        ).encode()
    )
    through.check_line(f"SORT_RO {{tag}}ids {option} {{tag}}*")


@pytest.mark.parametrize("arguments", ["LIMIT 0 x", "NOPE", "BY", "LIMIT 1", "DESC LIMIT 0"])
def test_mistake_in_sort_is_item_of_exec(through: Pair, arguments: str) -> None:
    lines = ["MULTI", "GET plain", f"SORT_RO {{tag}}ids {arguments}", "GET number", "EXEC"]
    for greeting in ([], [[b"HELLO", b"3"]]):
        through.check([*greeting, *[line.encode().split(b" ") for line in lines]])


def test_patterns_of_sort_that_are_refused_are_refused_within_exec(through: Pair) -> None:
    lines = [b"MULTI", b"SORT_RO {tag}ids BY hash:*", b"GET number", b"EXEC"]
    *queued, (answer,) = [[reply] for reply in through.replies_to([line.split() for line in lines])[1]]
    assert [each[0].raw for each in queued] == [b"+OK\r\n", b"+QUEUED\r\n", b"+QUEUED\r\n"]
    assert answer.raw.startswith(b"*2\r\n-ERR BY option of SORT denied in Cluster mode") and answer.raw.endswith(
        b"\r\n42\r\n"
    )


@given(pipeline=generators.pipelines)
@checked(50)
def test_pipeline_of_any_commands_is_answered_as_redis_answers_it(through: Pair, pipeline: list[Words]) -> None:
    through.check([words for words in pipeline if bytes(words[0]).lower().decode("latin-1") not in NOT_SPLIT])


IN_TRANSACTIONS = [
    ["MULTI", "OBJECT FOO s", "GET plain", "EXEC", "GET plain"],
    ["MULTI", "CLUSTER FOO", "EXEC", "PING"],
    ["MULTI", "CLIENT FOO", "GET plain", "EXEC"],
    ["MULTI", "CONFIG FOO x", "DISCARD", "GET plain"],
    ["MULTI", "NOPE a b", "OBJECT", "EXEC"],
    ["MULTI", "PUBLISH nobody x", "EXEC"],
    ["MULTI", "GET plain", "PUBLISH nobody x", "SPUBLISH nobody x", "PING", "PUBLISH nobody y", "GET number", "EXEC"],
    ["MULTI", "SUBSCRIBE a b", "PSUBSCRIBE c*", "GET plain", "EXEC"],
    ["MULTI", "UNSUBSCRIBE", "PING", "EXEC", "PING"],
    ["SUBSCRIBE a", "WATCH plain", "MULTI", "GET plain", "EXEC", "PING", "UNSUBSCRIBE a", "GET plain"],
    ["SUBSCRIBE a", "WATCH", "EXEC", "DISCARD", "UNWATCH", "UNSUBSCRIBE", "WATCH plain", "MULTI", "PING", "EXEC"],
    ["MULTI", "SUBSCRIBE a", "EXEC", "WATCH plain", "EXEC", "MULTI", "PING"],
    ["MULTI", "WATCH plain", "OBJECT ENCODING", "EXEC", "EXEC"],
    ["MULTI", "EXEC x", "PUBLISH a", "EXEC"],
    ["WATCH plain", "MULTI", "PUBLISH nobody x", "ECHO a", "COMMAND COUNT x", "EXEC", "EXEC"],
    ["CLIENT REPLY OFF", "MULTI", "OBJECT FOO s", "EXEC", "CLIENT REPLY ON", "GET plain"],
    ["CLIENT REPLY OFF", "MULTI", "PUBLISH nobody x", "EXEC", "CLIENT REPLY ON", "GET plain"],
]


@pytest.mark.parametrize("greeting", ["", "HELLO 3"], ids=["RESP2", "RESP3"])
@pytest.mark.parametrize("lines", IN_TRANSACTIONS, ids="; ".join)
def test_keyless_transactions_are_answered_as_by_redis(through: Pair, lines: list[str], greeting: str) -> None:
    through.check([line.encode().split(b" ") for line in [greeting, *lines] if line])


PIECES = [
    *[
        "MULTI",
        "EXEC",
        "GET plain",
        "MGET plain missing number",
        "LRANGE list:short 0 1",
        "DISCARD",
        "WATCH plain number",
    ],
    *["UNWATCH", "NOPE", "GET", "PING", "WATCH missing", "MULTI", "EXEC", "EXEC x", "RESET", "HGETALL hash:one"],
    *["GET hash:one", "EXISTS plain number missing", "CLIENT GETNAME", "QUIT", "LRANGE list:long 0 -1"],
    *["OBJECT FOO s", "CLUSTER FOO", "CONFIG FOO", "PUBLISH nobody x", "UNWATCH"],
]


@given(lines=st.lists(st.sampled_from(PIECES), max_size=14), is_new=st.booleans())
@checked(40)
def test_transactions_in_any_order_equal_redis(through: Pair, lines: list[str], is_new: bool) -> None:
    through.check([line.encode().split(b" ") for line in [*(["HELLO 3"] if is_new else []), *lines]])


@pytest.mark.parametrize("count", [b"1", b"7", b"5000"])
def test_scan_finds_each_key_once(through: Pair, dataset: Dataset, count: bytes) -> None:
    with through.sparkis.connect() as connection:
        assert sorted(scanned(connection, "COUNT", count)) == sorted(dataset.keys)
