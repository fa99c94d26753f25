"""Error classes and their lines."""

from __future__ import annotations

import pytest

from resp_server.protocol.errors import (
    PlainError,
    ReplyError,
    WrongTypeError,
    reply_error_of,
    unknown_command,
    wrong_arity,
)
from state_backend.model.errors import StoreError, WrongKindError


def test_two_classes_of_one_code_are_refused() -> None:
    with pytest.raises(TypeError, match="PlainError has the code ERR already"):
        type("Other", (ReplyError,), {}, code="ERR")


def test_a_line_break_within_an_error_becomes_a_space() -> None:
    assert PlainError("a\r\nb").line == b"ERR a  b"


def test_bytes_of_the_clients_own_come_back_as_they_were() -> None:
    assert unknown_command([b"\xff\xfe"]).line == b"ERR unknown command '\xff\xfe', with args beginning with: "


def test_a_long_unknown_command_is_cut() -> None:
    line = unknown_command([b"x" * 500, b"a" * 100, b"b" * 100, b"c"]).line
    assert line == b"ERR unknown command '%b', with args beginning with: '%b' '%b' " % (
        b"x" * 128,
        b"a" * 100,
        b"b" * 25,
    )


def test_arity_names_the_command() -> None:
    assert wrong_arity("client|setname").line == b"ERR wrong number of arguments for 'client|setname' command"


def test_errors_of_the_store_become_replies() -> None:
    assert isinstance(reply_error_of(WrongKindError("x")), WrongTypeError)
    assert reply_error_of(StoreError("disk full")).line == b"ERR disk full"
