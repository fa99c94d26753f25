"""Inputs that a fuzzer made, in any chunks: each gets whole replies, a protocol error, or nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Sequence
from threading import Thread
from typing import Any

import pytest

from compat.conformance.wire import replies_in
from compat.fuzz import corpus
from compat.fuzz.lines import FUZZED, NOT_FUZZED, ROOT, all_lines, files
from compat.fuzz.seeds import conversations, first_inputs
from compat.fuzz.subject import REQUESTS, FoundError, Subject, chunks_of
from compat.fuzz.swap_target import UPSTREAM_REQUESTS
from compat.fuzz.targets import EPOCHS, NODE, PASSWORD, PROXY, SCRIPTED, TWO, USER
from resp_server.client import connection
from resp_server.client.connection import Connection
from resp_server.command.table import Command
from resp_server.pipeline.immediate import ImmediatePipeline
from resp_server.protocol.replies import Pending

# A server that has stopped leaves no coroutine behind that waits: its end in garbage collection would be an error.
pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def subject() -> Iterator[Subject]:
    made = Subject()
    yield made
    made.close()


def test_fuzzed_files_are_there() -> None:
    found = files()
    assert all(path.is_file() for path in found) and all_lines()
    assert all(any(path.is_relative_to(ROOT / name) for path in found) for name in FUZZED)
    assert all((ROOT / name).is_file() for name in NOT_FUZZED)


def test_inputs_of_former_faults_break_nothing() -> None:
    for inputs in corpus.findings():
        subject = Subject(inputs_per_server=len(inputs))
        for data in inputs:
            subject.run(data)
        subject.close()


@pytest.mark.parametrize("options", [0, PROXY, SCRIPTED, SCRIPTED | TWO, SCRIPTED | PASSWORD, SCRIPTED | PROXY])
def test_inputs_may_have_no_more_than_options(subject: Subject, options: int) -> None:
    assert subject.run(bytes([options])) is not None
    subject.run(bytes([options, 1]))


def test_corpus_of_most_lines_finds_no_bug(subject: Subject) -> None:
    inputs = corpus.stored()
    assert len(inputs) > 100
    for data in inputs:
        subject.run(data)


@pytest.mark.parametrize("chunk_bytes", [1, 7, 200])
def test_answer_to_conversation_does_not_depend_on_its_chunks(subject: Subject, chunk_bytes: int) -> None:
    body = b"PING\r\n*2\r\n$3\r\nGET\r\n$5\r\nj:v:1\r\n*2\r\n$7\r\nHGETALL\r\n$5\r\nj:m:l\r\n"
    body += b"LRANGE j:l:l 0 -1\r\nnope\r\n*1\r\n+x\r\n"
    whole = subject.run(b"\0\0" + body)
    assert b"+PONG" in whole and whole.endswith(b"-ERR Protocol error: expected '$', got '+'\r\n")
    assert subject.run(bytes([0, chunk_bytes]) + body) == whole


@pytest.mark.parametrize("options", [0, PASSWORD, NODE, TWO, EPOCHS, TWO | EPOCHS, USER, PROXY, PROXY | NODE])
def test_each_kind_of_server_answers(subject: Subject, options: int) -> None:
    assert subject.run(bytes([options, 5]) + b"AUTH secret\r\nPING\r\n")


def test_chunks_are_whole_input_in_order() -> None:
    data = bytes(range(256)) * 3
    for how in range(256):
        chunks = list(chunks_of(data, how))
        assert b"".join(chunks) == data
        assert all(chunks)


def test_internal_error_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Command, "execute", lambda *ignored: 1 / 0)
    with pytest.raises(FoundError, match="internal error"):
        subject.run(b"\0\0PING\r\n")


def test_half_a_reply_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImmediatePipeline, "error_reply", lambda *ignored: b"$10\r\nhalf")
    with pytest.raises(FoundError, match="complete replies"):
        subject.run(b"\0\0nope\r\n")


def test_endlessly_busy_connection_is_found_and_removed(subject: Subject) -> None:
    with pytest.MonkeyPatch.context() as patched, pytest.raises(FoundError, match="not idle"):
        patched.setattr(connection, "TURN_NS_MAX", 0)
        patched.setattr(Connection, "_answer_or_step", lambda *ignored: True)
        subject.run(b"\0\0PING\r\n")
    assert subject.run(b"\0\0PING\r\n") == b"+PONG\r\n"


def test_error_that_another_thread_logs_is_none_of_server(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    def execute(*ignored: object) -> str:
        thread = Thread(target=logging.getLogger("resp_server").error, args=["of another test"])
        thread.start()
        thread.join()
        return "answered"

    monkeypatch.setattr(Command, "execute", execute)
    assert subject.run(b"\0\0PING\r\n")


def test_tasks_of_closed_subject_have_ended() -> None:
    subject = Subject()
    task = subject._loop.create_task(asyncio.sleep(1e9))
    subject.run(b"\0\0PING\r\n")
    assert not task.done()
    subject.close()
    assert task.cancelled()


def test_request_that_waits_for_ever_is_found(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compat.fuzz.subject.TIMEOUT_S", 3.0)
    monkeypatch.setattr(Connection, "_schedule_turn", lambda *ignored: None)
    monkeypatch.setattr(ImmediatePipeline, "answer", lambda *ignored: Pending(1e9, lambda: None))
    with pytest.raises(FoundError, match="the replies to all requests"):
        subject.run(b"\0\0PING\r\n")


@pytest.mark.parametrize("requests", conversations(), ids=lambda requests: b" ".join(requests[0]).decode())
def test_seeds_of_fuzzing_are_valid_requests(subject: Subject, requests: list[list[bytes]]) -> None:
    text = b"".join(b" ".join(words) + b"\r\n" for words in requests)
    replies = [each for options in (0, NODE) for each in replies_in(subject.run(bytes([options, 0]) + text))]
    errors = [each.raw for each in replies if each.is_error]
    assert len(errors) < len(replies)
    assert not [each for each in errors if b"syntax error" in each or b"wrong number" in each]


def test_fuzzing_starts_with_few_of_stored_inputs() -> None:
    stored = corpus.stored()
    first = first_inputs(stored)
    assert len(first) < len(stored) and len(first) < len(first_inputs([]))
    assert {PROXY, SCRIPTED, SCRIPTED | NODE} <= {data[0] & (PROXY | SCRIPTED | NODE) for data in first}


NO_ANSWERS = [
    b"$1\r\na\r\n" * 20,
    b"*1\r\n$1\r\na\r\n" * 9,
    b":1\r\n" * 9,
    b"$1\r\naxx" * 9,
    b"%-1\r\n$1\r\na\r\n",
    b"-MOVED 7 x\r\n" * 9,
    b"-MOVED 7 a..b:1\r\n",
    b">2\r\n$7\r\nchanged\r\n$4\r\n:1\r\n\r\n$1\r\na\r\n",
]
NO_ANSWERS_OF_UPSTREAMS = [
    b"",
    b"*1\r\n+OK\r\n" * 9,
    b"$9999999\r\n",
    b"%-1\r\n$1\r\na\r\n",
    b"-MOVED 7 a..b:1\r\n" * 5,
]


def pairs(requests: Sequence[Sequence[Sequence[bytes]]], said: Sequence[bytes]) -> list[Any]:
    """Pair the number of each request with each of these texts; slow is every second pair, of what others have, too."""
    return [
        pytest.param(
            asked,
            text,
            id=f"{b' '.join(words[-1]).decode()}-{number}",
            marks=[pytest.mark.slow] if (asked + number) % 2 else [],
        )
        for asked, words in enumerate(requests)
        for number, text in enumerate(said)
    ]


@pytest.mark.parametrize(("asked", "said"), pairs(REQUESTS, NO_ANSWERS))
def test_clients_of_proxy_get_replies_for_any_bytes_of_its_servers(subject: Subject, asked: int, said: bytes) -> None:
    subject.run(bytes([SCRIPTED, 0, asked]) + said)


@pytest.mark.parametrize(("asked", "said"), pairs(UPSTREAM_REQUESTS, NO_ANSWERS_OF_UPSTREAMS))
def test_clients_of_proxy_get_replies_for_any_bytes_of_its_upstream(subject: Subject, asked: int, said: bytes) -> None:
    subject.run(bytes([SCRIPTED | PROXY, 0, asked]) + said)


@pytest.mark.parametrize("said", [b":1\r\n" * 9, b"-ERR x\r\n" * 9, b"$9999999\r\n", b""])
def test_server_that_reports_no_jobs_is_asked_again_after_pauses(subject: Subject, said: bytes) -> None:
    subject.run(bytes([SCRIPTED | NODE, 0, 0]) + said)


def test_server_that_closes_at_each_request_is_not_retried_forever(subject: Subject) -> None:
    for options in (SCRIPTED, SCRIPTED | NODE, SCRIPTED | TWO):
        subject.run(bytes([options, 0, 1]) + b"xx")


@pytest.mark.parametrize("place", [b"7 10.\x98:7379", b"7", b"x y:1", b"99999 y:1"])
def test_malformed_moved_is_error_at_once(subject: Subject, place: bytes) -> None:
    for asked in (0, 3):
        sent = subject.run(bytes([SCRIPTED, 0, asked]) + b"-MOVED %b\r\n" % place * 9)
        assert b"malformed MOVED" in sent and b"in time" not in sent
