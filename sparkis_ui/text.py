"""Bytes, numbers and times as people read them, and keys in URLs and in copied lines of code. Pure."""

from __future__ import annotations

import json
import re
import shlex
import unicodedata
from collections.abc import Iterable
from datetime import UTC, datetime
from urllib.parse import parse_qsl, quote, urlencode

UNKNOWN = "\N{EN DASH}"  # in place of a number
SHOWN_CHARS_MAX = 2048  # of one value in a table
# Control, format (they turn the direction of text, or hide it), surrogate, private and unassigned characters.
INVISIBLE = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")
DIGITS_READ = 10  # of a number
PARAMETERS_MAX = 100  # of a URL; later ones are left out
HEX = "-hex"  # ends the names of parameters whose value is written in hexadecimal digits


def shown(data: bytes | str | float | None, limit: int = SHOWN_CHARS_MAX) -> str:
    r"""Return bytes as text in which every character is visible: others are \xNN or \uNNNN. Longer text is cut."""
    if data is None:
        return "(nil)"
    if not isinstance(data, bytes | str):
        return number(data)
    cut = data[: 4 * limit]
    text = cut.decode("utf-8", "backslashreplace") if isinstance(cut, bytes) else cut
    visible = "".join(map(_visible, text[:limit]))
    return visible + " …" if len(text) > limit or len(data) > len(cut) else visible


def _visible(character: str) -> str:
    if unicodedata.category(character) not in INVISIBLE:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def number(value: float | None) -> str:
    """Return a number with separators of thousands, and as many decimals as it needs."""
    if value is None:
        return UNKNOWN
    if isinstance(value, float) and not value.is_integer():
        return f"{value:,.2f}".rstrip("0").rstrip(".") if abs(value) < 1e15 else repr(value)
    return f"{value:,.0f}"


def short(value: float | None) -> str:
    """Return a number in at most five characters or so: 1.2 k, 34 M."""
    if value is None:
        return UNKNOWN
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g}"


def size(count: float | None) -> str:
    """Return a number of bytes in its largest unit."""
    if count is None:
        return UNKNOWN
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {unit}"
    return f"{count:.0f} B"


def duration(ms: float | None) -> str:
    """Return a time in its largest unit: 340 ms, 1.2 s, 90 min, 50 h, 4 d."""
    if ms is None:
        return UNKNOWN
    if ms < 1000:
        return f"{ms:.0f} ms"
    seconds = ms / 1000
    if seconds < 100:
        return f"{seconds:.1f} s"
    for unit, length in (("min", 60), ("h", 3600)):
        if seconds < 100 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def countdown(ms: float) -> str:
    """Return the time that is left, to the second: 9 s, 4:09, 1:02:09, 2 d 1:02:09."""
    seconds = max(0, round(ms / 1000))
    (minutes, second), days = divmod(seconds % 86_400, 60), seconds // 86_400
    hours, minute = divmod(minutes, 60)
    if days or hours:
        return f"{f'{days} d ' if days else ''}{hours}:{minute:02}:{second:02}"
    return f"{minute}:{second:02}" if minute else f"{second} s"


def clock(seconds: float) -> str:
    """Return the UTC time of day."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%H:%M:%S")


def numeric(data: bytes | str) -> float | None:
    """Return a value as a finite number; None if it is none."""
    if len(data) > 32:
        return None
    try:
        value = float(data)
    except ValueError:
        return None
    return value if value - value == 0 else None


def rounded(data: bytes) -> str:
    """Return a value as text; of a number with many digits only those that a reader takes in at a look."""
    value = numeric(data) if len(data) > DIGITS_READ else None
    if value is None or value.is_integer():
        return shown(data, 200)
    return f"{value:.4g}" if abs(value) < 1 else f"{value:.4f}"


class Query:
    """The parameters of a URL, whose keys and patterns may be any bytes."""

    def __init__(self, query_string: bytes) -> None:
        first = "&".join(query_string.decode("latin-1").split("&", PARAMETERS_MAX)[:PARAMETERS_MAX])
        self._pairs = parse_qsl(first, encoding="utf-8", errors="surrogateescape")

    def text(self, name: str) -> str:
        """Return a parameter as text, which a page may show; the first, if there are several."""
        return next((_bytes(value).decode("utf-8", "replace") for each, value in self._pairs if each == name), "")

    def raw(self, name: str) -> bytes:
        """Return a parameter as bytes."""
        return next(iter(self.all(name)), b"")

    def all(self, name: str) -> list[bytes]:
        """Return all parameters of a name as bytes, without empty ones."""
        found = [
            _bytes(value) if each == name else _of_hex(value)
            for each, value in self._pairs
            if each in (name, name + HEX)
        ]
        return list(filter(None, found))

    def integer(self, name: str, default: int, most: int) -> int:
        """Return a parameter as an integer from 0 to `most`; the default if it is not a number."""
        text = self.text(name)
        return min(int(text), most) if re.fullmatch(r"\d{1,18}", text) else default


def decimal(text: str) -> int:
    """Return an offset or a cursor of a URL; 0, the beginning, for any text but decimal digits."""
    return int(text) if re.fullmatch(r"[0-9]{1,20}", text) else 0


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _of_hex(text: str) -> bytes:
    return bytes.fromhex(text) if re.fullmatch(r"([0-9a-f]{2})*", text) else b""


def field(name: str, data: bytes) -> tuple[str, str]:
    """Return the name and the value of a form's field with which the browser sends these bytes.

    Browsers send text, with other line ends: other bytes are sent as hexadecimal digits, which `Query` reads.
    """
    plain = data.decode("utf-8", "replace")
    return (name, plain) if shown(data, len(data)) == plain else (name + HEX, data.hex())


def link(path: str, **parameters: bytes | str | int | Iterable[bytes] | None) -> str:
    """Return the URL of a page; parameters that are None or empty are left out."""
    pairs: list[tuple[str, bytes | str | int]] = []
    for name, value in parameters.items():
        if isinstance(value, bytes | str | int):
            pairs += [(name, value)] if value != "" and value != b"" else []
        elif value is not None:
            pairs += [(name, each) for each in value]
    return f"{path}?{urlencode(pairs, quote_via=quote)}" if pairs else path


READS = {
    "string": ("GET", ""),
    "hash": ("HGETALL", ""),
    "list": ("LRANGE", "0 -1"),
    "set": ("SMEMBERS", ""),
    "zset": ("ZREVRANGE", "0 9 WITHSCORES"),
}
PYTHON = {"LRANGE": ", 0, -1", "ZREVRANGE": ", 0, 9, withscores=True"}
JAVASCRIPT = {
    "GET": "get({})",
    "HGETALL": "hGetAll({})",
    "LRANGE": "lRange({}, 0, -1)",
    "SMEMBERS": "sMembers({})",
    "ZREVRANGE": "zRangeWithScores({}, 0, 9, {{ REV: true }})",
}


def code_of(kind: str, key: bytes, url: str) -> dict[str, str]:
    """Return the lines that read a key, for redis-cli in a shell, redis-py and node-redis. Empty: an unknown kind."""
    if kind not in READS:
        return {}
    command, rest = READS[kind]
    plain = re.fullmatch(rb"[\x20-\x7e]*", key) is not None
    python = repr(key.decode() if plain else key)
    script = json.dumps(key.decode()) if plain else f"Buffer.from('{key.hex()}', 'hex')"
    return {
        "redis-cli": f"redis-cli -u {shlex.quote(url)} {command} {_shell(key, plain)} {rest}".rstrip(),
        "redis-py": f"redis.Redis.from_url({url!r}).{command.lower()}({python}{PYTHON.get(command, '')})",
        "JavaScript": f"await createClient({{ url: {json.dumps(url)} }}).connect()"
        f".then(client => client.{JAVASCRIPT[command].format(script)})",
    }


def _shell(key: bytes, plain: bool) -> str:
    if plain:
        return shlex.quote(key.decode())
    return "$'" + "".join(f"\\x{byte:02x}" for byte in key) + "'"
