"""Words of inline commands, as sdssplitargs of Redis splits them."""

from __future__ import annotations

import pytest

from resp_server.protocol.errors import ProtocolError
from resp_server.protocol.inline import inline_arguments

VALID_LINES = [
    (b"", []),
    (b" \t\r\n\v\f", []),
    (b"GET a", [b"GET", b"a"]),
    (b" GET\t a \r", [b"GET", b"a"]),
    (b"GET a\0b c", [b"GET", b"a"]),
    (b"a\vb c", [b"a\vb", b"c"]),  # only a space, a tab or a line end ends a word
    (b"\v\fa b", [b"a", b"b"]),
    (b"'' \"\"", [b"", b""]),
    (b"'a b' \"c d\"", [b"a b", b"c d"]),
    (b"'a'\v'b'", [b"a", b"b"]),
    (b"a'b c'", [b"ab c"]),
    (b"'\"' \"'\"", [b'"', b"'"]),
    (b'"\\n\\r\\t\\b\\a"', [b"\n\r\t\b\a"]),
    (b'"\\q\\"\\\\"', [b'q"\\']),
    (b'"\\x41\\xfF\\x0a"', [b"A\xff\n"]),
    (b'"\\x4" "\\xg1" "\\x1g"', [b"x4", b"xg1", b"x1g"]),  # not two hexadecimal digits
    (b"'it\\'s\\n\\x41'", [b"it's\\n\\x41"]),
    (b'a\\n "b"', [b"a\\n", b"b"]),  # no escapes outside of quotes
]


@pytest.mark.parametrize(("line", "words"), VALID_LINES)
def test_line_is_split_into_words(line: bytes, words: list[bytes]) -> None:
    assert inline_arguments(line) == words


@pytest.mark.parametrize(
    "line",
    [b"'", b'"', b"a 'b", b'a "b', b"'a'b", b'"a"b', b"'a''b'", b'"\\', b'"\\x', b'"\\x4', b'"\\"', b"'\\'"],
)
def test_quote_that_is_not_closed_or_is_followed_by_text_is_error(line: bytes) -> None:
    with pytest.raises(ProtocolError, match=r"^unbalanced quotes in request$"):
        inline_arguments(line)
