"""Inline commands: a line of arguments, quoted or not, parsed by the rules of Redis' sdssplitargs."""

from __future__ import annotations

from resp_server.protocol.errors import ProtocolError

# Allowed before an argument and after a closing quote; only the first four end an unquoted argument.
SPACES = b" \t\n\r\v\f"
ARGUMENT_ENDS = SPACES[:4]
HEX = b"0123456789abcdefABCDEF"
ESCAPES = {b"n": b"\n", b"r": b"\r", b"t": b"\t", b"b": b"\b", b"a": b"\a"}


def inline_arguments(line: bytes) -> list[bytes]:
    """Return the arguments in a line; ProtocolError if a quote is not closed, or no space follows a closing quote."""
    line = line.removesuffix(b"\r").partition(b"\0")[0]
    if not any(character in line for character in (b'"', b"'", b"\v", b"\f")):
        return line.split()
    arguments = []
    at = _skip_spaces(line, 0)
    while at < len(line):
        argument, at = _argument(line, at)
        arguments.append(argument)
        at = _skip_spaces(line, at)
    return arguments


def _skip_spaces(line: bytes, at: int) -> int:
    while at < len(line) and line[at] in SPACES:
        at += 1
    return at


def _argument(line: bytes, at: int) -> tuple[bytes, int]:
    """Return the argument at an offset, and the offset after it. A quote may start within an argument and ends it."""
    argument = bytearray()
    while at < len(line) and line[at] not in ARGUMENT_ENDS:
        character = line[at : at + 1]
        at += 1
        if character not in (b'"', b"'"):
            argument += character
            continue
        at = _quoted(line, at, character, argument)
        if at < len(line) and line[at] not in SPACES:
            raise ProtocolError("unbalanced quotes in request")
        break
    return bytes(argument), at


def _quoted(line: bytes, at: int, quote: bytes, argument: bytearray) -> int:
    """Append the text up to the closing quote; return the offset after the quote."""
    unescape = _unescape_double if quote == b'"' else _unescape_single
    while at < len(line):
        character = line[at : at + 1]
        if character == quote:
            return at + 1
        text, length = unescape(line, at) if character == b"\\" else (character, 1)
        argument += text
        at += length
    raise ProtocolError("unbalanced quotes in request")


def _unescape_double(line: bytes, at: int) -> tuple[bytes, int]:
    r"""Return the byte of an escape such as `\x41` or `\n`, and the escape's length."""
    if line[at + 1 : at + 2] == b"x" and len(line) > at + 3 and line[at + 2] in HEX and line[at + 3] in HEX:
        return bytes([int(line[at + 2 : at + 4], 16)]), 4
    escaped = line[at + 1 : at + 2]
    return ESCAPES.get(escaped, escaped), 2


def _unescape_single(line: bytes, at: int) -> tuple[bytes, int]:
    r"""Return a quote for `\'`, else the backslash, and the length that was read."""
    return (b"'", 2) if line[at + 1 : at + 2] == b"'" else (b"\\", 1)
