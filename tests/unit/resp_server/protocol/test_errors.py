"""Error classes and their lines."""

from __future__ import annotations

import re

import pytest

from resp_server.protocol.errors import (
    ClusterDownError,
    CrossSlotError,
    DeniedError,
    ExecAbortError,
    GenericError,
    LoadingError,
    MovedError,
    NoAuthError,
    NoEpochError,
    NoPermError,
    NoProtoError,
    NoScriptError,
    ProtocolError,
    ReadOnlyError,
    ReplyError,
    TryAgainError,
    WrongPassError,
    WrongTypeError,
    cluster_disabled,
    cluster_is_static,
    internal_error,
    not_an_integer,
    not_served,
    reply_error_of,
    syntax_error,
    unknown_command,
    unknown_subcommand,
    wrong_arity,
    wrong_subcommand,
)
from state_backend.model.errors import JobLoadingError, SlotLoadingError, StoreDamagedError, StoreError, WrongKindError

DENIED = (
    "DENIED Redis is running in protected mode because protected mode is enabled and no password is set for the "
    "default user. In this mode connections are only accepted from the loopback interface. If you want to "
    "connect from external computers, either set a password, or turn the protected mode off and MAKE SURE "
    "that the server is not publicly accessible from internet if you do so."
)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (GenericError("x"), "ERR x"),
        (WrongTypeError(), "WRONGTYPE Operation against a key holding the wrong kind of value"),
        (ReadOnlyError(), "READONLY You can't write against a read only replica."),
        (NoAuthError(), "NOAUTH Authentication required."),
        (NoAuthError("x"), "NOAUTH x"),
        (WrongPassError(), "WRONGPASS invalid username-password pair or user is disabled."),
        (NoPermError("x"), "NOPERM x"),
        (NoProtoError(), "NOPROTO unsupported protocol version"),
        (NoScriptError(), "NOSCRIPT No matching script. Please use EVAL."),
        (LoadingError(), "LOADING Redis is loading the dataset in memory"),
        (MovedError(7, "h:1"), "MOVED 7 h:1"),
        (CrossSlotError(), "CROSSSLOT Keys in request don't hash to the same slot"),
        (ClusterDownError(), "CLUSTERDOWN Hash slot not served"),
        (ClusterDownError("x"), "CLUSTERDOWN Hash slot not served: x"),
        (TryAgainError("x"), "TRYAGAIN x"),
        (ExecAbortError(), "EXECABORT Transaction discarded because of previous errors."),
        (ExecAbortError(GenericError("x")), "EXECABORT Transaction discarded because of: x"),
        (ExecAbortError(NoPermError("x")), "EXECABORT Transaction discarded because of: NOPERM x"),
        (NoEpochError("x"), "NOEPOCH x"),
        (DeniedError(), DENIED),
        (ProtocolError("x"), "ERR Protocol error: x"),
        (syntax_error(), "ERR syntax error"),
        (not_an_integer(), "ERR value is not an integer or out of range"),
        (unknown_subcommand("client", b"x" * 129), f"ERR unknown subcommand '{'x' * 128}'. Try CLIENT HELP."),
        (
            wrong_subcommand("client", b"x" * 129),
            f"ERR unknown subcommand or wrong number of arguments for '{'x' * 128}'. Try CLIENT HELP.",
        ),
        (not_served("x"), "ERR command 'x' is not served by sparkis"),
        (cluster_disabled(), "ERR This instance has cluster support disabled"),
        (cluster_is_static("x"), "ERR command 'x' is not served by sparkis: a node does not change its topology"),
    ],
)
def test_error_has_line_that_clients_parse(error: ReplyError | ProtocolError, line: str) -> None:
    assert error.line == line.encode()


def test_two_classes_of_one_code_are_refused() -> None:
    with pytest.raises(TypeError, match="GenericError has the code ERR already"):
        type("Other", (ReplyError,), {}, code="ERR")


def test_line_break_within_error_becomes_space() -> None:
    assert GenericError("a\r\nb").line == b"ERR a  b"


def test_error_keeps_bytes_of_request() -> None:
    line = b"ERR unknown command '\xff\xfe', with args beginning with: '\xfd' "
    assert unknown_command([b"\xff\xfe", b"\xfd"]).line == line


def test_long_unknown_command_is_cut() -> None:
    line = unknown_command([b"x" * 500, b"a" * 100, b"b" * 100, b"c"]).line
    assert line == b"ERR unknown command '%b', with args beginning with: '%b' '%b' " % (
        b"x" * 128,
        b"a" * 100,
        b"b" * 25,
    )
    exactly = unknown_command([b"x", b"a" * 125, b"b"]).line
    assert exactly == b"ERR unknown command 'x', with args beginning with: '%b' " % (b"a" * 125)


def test_arity_names_command() -> None:
    assert wrong_arity("client|setname").line == b"ERR wrong number of arguments for 'client|setname' command"


def test_argument_is_shown_up_to_its_first_zero_byte() -> None:
    assert unknown_command([b"x\0y", b"a\0b"]).line == b"ERR unknown command 'x', with args beginning with: 'a' "


@pytest.mark.parametrize(
    ("error", "line", "line_of_a_node"),
    [
        (WrongKindError("x"), WrongTypeError().line, WrongTypeError().line),
        (StoreError("disk full"), b"ERR disk full", b"ERR disk full"),
        (JobLoadingError("x"), b"LOADING x", b"LOADING x"),
        (StoreDamagedError("x"), b"LOADING x", b"LOADING x"),
        (SlotLoadingError("x"), b"LOADING x", b"CLUSTERDOWN Hash slot not served: x"),
    ],
)
def test_errors_of_store_become_replies(error: StoreError, line: bytes, line_of_a_node: bytes) -> None:
    assert reply_error_of(error).line == line
    assert reply_error_of(error, is_node=True).line == line_of_a_node


def test_unexpected_exception_is_logged_with_id_of_error_reply(
    caplog: pytest.LogCaptureFixture,
) -> None:
    error = ValueError("x")
    reply, other = internal_error(error), internal_error(error)
    assert reply.line != other.line
    assert re.fullmatch(rb"ERR internal error [0-9a-f]{8}", reply.line)
    assert caplog.records[0].message == reply.text
    assert caplog.records[0].exc_info is not None and caplog.records[0].exc_info[1] is error
