"""Declarations: what a signature says about a command."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import pytest

from resp_server.command.handler import (
    BatchArgument,
    DeclarationError,
    OneOrMore,
    Parameters,
    command,
    integer,
)
from resp_server.protocol.errors import GenericError


def fixed(context: Any, key: bytes, at: int) -> None: ...
def optional(context: Any, key: bytes | None = None) -> None: ...
def many(context: Any, *keys: OneOrMore) -> None: ...
def any_number(context: Any, first: bytes, *rest: bytes) -> None: ...
def converted(context: Any, length: Annotated[int, len]) -> None: ...


@pytest.mark.parametrize(("body", "arity"), [(fixed, 3), (optional, -1), (many, -2), (any_number, -2), (converted, 2)])
def test_arity_follows_from_signature(body: Any, arity: int) -> None:
    assert Parameters.of(body).arity(1) == arity


def test_subcommands_name_counts_two_words() -> None:
    declared = command("config|get")(many)
    assert declared.arity == -3


def test_arguments_are_converted_as_annotated() -> None:
    assert Parameters.of(fixed).convert([b"k", b"-12"]) == [b"k", -12]
    assert Parameters.of(converted).convert([b"four"]) == [4]
    assert Parameters.of(any_number).convert([b"a", b"b", b"c"]) == [b"a", b"b", b"c"]


def test_texts_are_taken_as_they_are_sent() -> None:
    assert Parameters.of(many).needs_no_conversion
    assert not Parameters.of(fixed).needs_no_conversion


@pytest.mark.parametrize(
    ("word", "number"),
    [(b"0", 0), (b"-1", -1), (b"9223372036854775807", 2**63 - 1), (b"-9223372036854775808", -(2**63))],
)
def test_number_has_64_bits(word: bytes, number: int) -> None:
    assert integer(word) == number


@pytest.mark.parametrize(
    "word", [b"", b"+1", b"01", b"-0", b" 1", b"1 ", b"1_0", b"1.0", b"9223372036854775808", b"1" * 5000, "१".encode()]
)
def test_other_texts_are_no_numbers(word: bytes) -> None:
    with pytest.raises(GenericError, match="not an integer or out of range"):
        integer(word)


def of_another_type(context: Any, what: dict[str, int]) -> None: ...


def of_a_batch_and_more(context: Any, keys: BatchArgument, at: int) -> None: ...


def by_name_only(context: Any, *, what: bytes) -> None: ...


@pytest.mark.parametrize(
    ("body", "reason"), [(of_another_type, "'what'"), (of_a_batch_and_more, "batch argument"), (by_name_only, "'what'")]
)
def test_wrong_arguments_are_refused(body: Callable[..., None], reason: str) -> None:
    with pytest.raises(DeclarationError, match=reason):
        command("x")(body)
