"""Bytes, numbers and times as text; keys in URLs and in lines of code."""

from __future__ import annotations

import ast
import json
import re
import shlex

import pytest

from sparkis_ui import text


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"plain", "plain"),
        ("größer".encode(), "größer"),
        (b"\x00\x1b[31m\r\n", r"\x00\x1b[31m\x0d\x0a"),
        (b"\xff\xfe", r"\xff\xfe"),
        ("a\u202egnp.exe".encode(), r"a\u202egnp.exe"),
        ("\u2066\u200b".encode(), r"\u2066\u200b"),
        ("\U000e0041".encode(), r"\U000e0041"),
        (b"<b>", "<b>"),
        (None, "(nil)"),
        (1234.5, "1,234.5"),
    ],
)
def test_every_character_of_shown_value_is_visible(data: bytes | float | None, shown: str) -> None:
    assert text.shown(data) == shown


def test_long_value_is_cut_and_marked() -> None:
    assert text.shown(b"x" * 100, 10) == "x" * 10 + " …"
    assert text.shown(b"x" * 10, 10) == "x" * 10
    assert len(text.shown(b"\x00" * (5 << 20), 10)) < 50


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, text.UNKNOWN), (0, "0"), (1234567, "1,234,567"), (2.5, "2.5"), (3.0, "3"), (1e300 + 0.5, f"{1e300:,.0f}")],
)
def test_numbers_have_separators_and_decimals_that_they_need(value: float | None, shown: str) -> None:
    assert text.number(value) == shown


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"1526720", "1526720"),
        (b"12345678901234567", "12345678901234567"),
        (b"8.0756", "8.0756"),
        (b"8.075596816976127", "8.0756"),
        (b"-1480607.2695035462", "-1480607.2695"),
        (b"0.022999676060900552", "0.023"),
        (b"0.00000123456789", "1.235e-06"),
        (b"2013-04-02T23:00:00Z", "2013-04-02T23:00:00Z"),
    ],
)
def test_number_with_many_digits_is_rounded(data: bytes, shown: str) -> None:
    assert text.rounded(data) == shown


def test_short_numbers_sizes_and_times_are_in_their_largest_unit() -> None:
    assert [text.short(each) for each in (None, 7, 1234, 5.67e6, 8e9)] == [text.UNKNOWN, "7", "1.23 k", "5.67 M", "8 G"]
    assert [text.size(each) for each in (12, 12_345, 5e6, 7e9)] == ["12 B", "12.3 kB", "5 MB", "7 GB"]
    assert [text.duration(each) for each in (340, 1200, 5.4e6, 1.8e8, 4e8)] == [
        "340 ms",
        "1.2 s",
        "90 min",
        "50 h",
        "5 d",
    ]


@pytest.mark.parametrize(
    ("ms", "shown"),
    [
        (-5, "0 s"),
        (9_400, "9 s"),
        (249_000, "4:09"),
        (3_729_000, "1:02:09"),
        (2 * 86_400_000 + 3_729_000, "2 d 1:02:09"),
        (86_400_000, "1 d 0:00:00"),
    ],
)
def test_remaining_time_to_live_is_shown_in_seconds(ms: float, shown: str) -> None:
    assert text.countdown(ms) == shown


@pytest.mark.parametrize(
    ("data", "number"),
    [(b"12.5", 12.5), (b"-3", -3.0), (b"nan", None), (b"inf", None), (b"12 km", None), (b"9" * 40, None), (b"", None)],
)
def test_only_finite_numbers_have_graphs(data: bytes, number: float | None) -> None:
    assert text.numeric(data) == number


@pytest.mark.parametrize("key", [b"job:state:k", b"a b&c=d#e?f/%", b"\x00\xff\xfe", "größer".encode(), b"<script>"])
def test_link_leads_back_to_same_bytes(key: bytes) -> None:
    path, _, query = text.link("/watch", key=[key, b"other"], pattern=b"", count=3).partition("?")
    found = text.Query(query.encode())
    assert path == "/watch"
    assert found.all("key") == [key, b"other"]
    assert found.raw("key") == key
    assert found.text("pattern") == ""
    assert found.integer("count", 1, 2) == 2


@pytest.mark.parametrize("key", [b"job:state:k", b"", b"\x00\xff\xfe", b"a\r\nb", "größer".encode(), b"x" * 5000])
def test_form_field_is_visible_and_round_trips(key: bytes) -> None:
    name, value = text.field("key", key)
    assert text.shown(value, len(value)) == value
    assert text.Query(text.link("/", **{name: value}).encode().partition(b"?")[2]).raw("key") == key


def test_digits_that_are_not_hexadecimal_are_no_parameter() -> None:
    assert text.Query(b"key-hex=0g&key-hex=abc&key-hex=&key-hex=6a").all("key") == [b"j"]


def test_parameter_that_is_no_number_has_its_default() -> None:
    assert [text.Query(f"count={each}".encode()).integer("count", 7, 10) for each in ("x", "-1", "", "9" * 30)] == [
        7
    ] * 4


@pytest.mark.parametrize(
    ("given", "number"),
    [
        ("50", 50),
        ("9" * 20, 10**20 - 1),
        ("9" * 5000, 0),
        ("²", 0),
        ("\N{ARABIC-INDIC DIGIT ONE}", 0),
        ("-1", 0),
        ("", 0),
    ],
)
def test_offset_that_is_no_number_is_beginning(given: str, number: int) -> None:
    assert text.decimal(given) == number


def test_text_of_parameter_can_be_written_into_page() -> None:
    assert text.Query(b"job=%ff%C3%BC").text("job").encode().decode() == "\N{REPLACEMENT CHARACTER}ü"


def test_url_has_limited_number_of_parameters() -> None:
    found = text.Query(b"&".join(b"key=%d" % number for number in range(text.PARAMETERS_MAX + 5)))
    assert found.all("key") == [b"%d" % number for number in range(text.PARAMETERS_MAX)]


KEYS = [b"job:state:k", b'it\'s "so" $HOME `x` \\', b"\x00\xff", b"', process.exit(), '"]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("kind", text.READS)
def test_copied_line_of_shell_has_key_as_one_word(kind: str, key: bytes) -> None:
    line = text.code_of(kind, key, "redis://h:1")["redis-cli"]
    if line.count("$'\\x"):
        written = re.search(r"\$'((?:\\x[0-9a-f]{2})+)'", line)
        assert written is not None
        assert bytes.fromhex(written[1].replace("\\x", "")) == key
    else:
        assert key.decode() in shlex.split(line)


@pytest.mark.parametrize("key", KEYS)
def test_copied_line_of_python_is_one_call_with_key(key: bytes) -> None:
    tree = ast.parse(text.code_of("zset", key, "redis://h:1")["redis-py"], mode="eval").body
    assert isinstance(tree, ast.Call)
    found = ast.literal_eval(tree.args[0])
    assert (found.encode() if isinstance(found, str) else found) == key


@pytest.mark.parametrize("key", KEYS)
def test_copied_line_of_javascript_has_key_as_literal(key: bytes) -> None:
    line = text.code_of("string", key, "redis://h:1")["JavaScript"]
    literal = f"Buffer.from('{key.hex()}', 'hex')" if key == b"\x00\xff" else json.dumps(key.decode())
    assert f"client.get({literal})" in line


def test_missing_key_has_no_line_of_code() -> None:
    assert text.code_of("none", b"k", "redis://h:1") == {}
