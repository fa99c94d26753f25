"""Transcripts of clients: how they are read, and which replies are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from compat.conformance.transcripts import FOLDER, is_right, load
from compat.conformance.wire import replies_in


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_each_transcript_can_be_read(path: Path) -> None:
    transcript = load(path)
    assert transcript.client and transcript.what and transcript.writes


def test_lines_up_to_empty_one_are_one_write(tmp_path: Path) -> None:
    path = tmp_path / "one.txt"
    path.write_text('client: A\nwhat: b\non: server\n\nPING => any\nGET "a b" => nil\n\n@2 PING => text PONG\n')
    transcript = load(path)
    assert [[line.words for line in write] for write in transcript.writes] == [
        [[b"PING"], [b"GET", b"a b"]],
        [[b"PING"]],
    ]
    assert [line.connection for write in transcript.writes for line in write] == [1, 1, 2]


@pytest.mark.parametrize(
    "text",
    [
        "client: A\nwhat: b\n\nPING => any\n",
        "client: A\nwhat: b\non: nowhere\n\nPING => any\n",
        "client: A\nwhat: b\non: server\n\nPING\n",
        "client: A\nwhat: b\non: server\n\nPING => \n",
    ],
)
def test_transcript_that_lacks_something_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "one.txt"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"one\.txt"):
        load(path)


RIGHT = [
    (b"-ERR x\r\n", "any"),
    (b"-ERR x y\r\n", "error ERR x"),
    (b"+OK\r\n", "ok"),
    (b"$-1\r\n", "nil"),
    (b"_\r\n", "nil"),
    (b":1\r\n", "integer"),
    (b"*0\r\n", "array"),
    (b">1\r\n+x\r\n", "array"),
    (b"%0\r\n", "some"),
    (b"$3\r\na b\r\n", "text a b"),
    (b"=9\r\ntxt:a:1 b\r\n", "contains b a:"),
    (b"$8\r\na:1\r\nb:2\r\n", "fields a b"),
    (b"*2\r\n+a\r\n:1\r\n", "map a"),
    (b"%1\r\n+a\r\n:1\r\n", "map a"),
]
WRONG = [
    (b"+OK\r\n", "error ERR"),
    (b"-ERR x\r\n", "ok"),
    (b"$0\r\n\r\n", "nil"),
    (b"$1\r\n1\r\n", "integer"),
    (b"%0\r\n", "array"),
    (b"$-1\r\n", "some"),
    (b"-ERR a b\r\n", "text ERR a b"),
    (b"$1\r\na\r\n", "contains b"),
    (b"-a:1\r\n", "fields a"),
    (b"*2\r\n:1\r\n+a\r\n", "map a"),
]


@pytest.mark.parametrize(("raw", "check"), RIGHT)
def test_reply_that_client_can_use_is_right(raw: bytes, check: str) -> None:
    assert is_right(replies_in(raw)[0], check.split())


@pytest.mark.parametrize(("raw", "check"), WRONG)
def test_reply_that_client_cannot_use_is_wrong(raw: bytes, check: str) -> None:
    assert not is_right(replies_in(raw)[0], check.split())


def test_missing_check_is_error() -> None:
    with pytest.raises(ValueError, match="no check 'nope'"):
        is_right(replies_in(b"+OK\r\n")[0], ["nope"])
