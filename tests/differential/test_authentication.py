"""With a password: AUTH, the replies before it, and the order of the checks are those of Redis."""

from __future__ import annotations

import pytest

from compat.conformance.pair import Pair
from compat.conformance.wire import Words, request, requests
from compat.reference.capture import REFERENCE, load

PASSWORD = b"s3cret pass"

PIPELINES: list[list[Words]] = [
    [[b"PING"]],
    [[b"ECHO", b"a"], [b"GET", b"plain"], [b"COMMAND"], [b"CLIENT", b"ID"], [b"INFO"]],
    [[b"nope", b"a"], [b"CLIENT", b"nope"], [b"GET"], [b"GET", b"a", b"b"], [b"SET"], [b"SET", b"a", b"b"]],
    [[b"AUTH", PASSWORD], [b"GET", b"plain"]],
    [[b"AUTH", b"default", PASSWORD], [b"GET", b"plain"]],
    [[b"auth", b"wrong"], [b"GET", b"plain"]],
    [
        [b"AUTH", b"default", b"wrong"],
        [b"AUTH", b"nobody", PASSWORD],
        [b"AUTH", b"DEFAULT", PASSWORD],
        [b"AUTH", b"", b""],
    ],
    [[b"AUTH"], [b"AUTH", b"a", b"b", b"c"], [b"AUTH", PASSWORD + b"\x00"], [b"AUTH", PASSWORD[:-1]], [b"AUTH", b""]],
    [[b"AUTH", PASSWORD], [b"AUTH", b"wrong"], [b"GET", b"plain"]],
    [[b"HELLO"]],
    [
        [b"HELLO", b"2"],
        [b"HELLO", b"4"],
        [b"HELLO", b"x"],
        [b"HELLO", b"3", b"SETNAME", b"a"],
        [b"HELLO", b"3", b"nope"],
    ],
    [[b"HELLO", b"3", b"AUTH", b"default", PASSWORD], [b"GET", b"nope"], [b"CLIENT", b"GETNAME"]],
    [[b"HELLO", b"3", b"AUTH", b"default", PASSWORD, b"SETNAME", b"me"], [b"CLIENT", b"GETNAME"]],
    [[b"HELLO", b"3", b"SETNAME", b"me", b"AUTH", b"default", PASSWORD], [b"CLIENT", b"GETNAME"]],
    [
        [b"HELLO", b"3", b"AUTH", b"default", b"wrong"],
        [b"PING"],
        [b"HELLO", b"2", b"AUTH", b"default", PASSWORD],
        [b"GET", b"nope"],
    ],
    [[b"HELLO", b"4", b"AUTH", b"default", PASSWORD], [b"PING"]],
    [[b"HELLO", b"3", b"AUTH", b"default"], [b"HELLO", b"3", b"AUTH"]],
    [[b"RESET"], [b"PING"]],
    [[b"AUTH", PASSWORD], [b"HELLO", b"3"], [b"CLIENT", b"SETNAME", b"me"], [b"RESET"], [b"GET", b"nope"], [b"PING"]],
    [[b"AUTH", PASSWORD], [b"RESET"], [b"AUTH", PASSWORD], [b"CLIENT", b"GETNAME"], [b"GET", b"nope"]],
    [[b"QUIT"], [b"PING"]],
    [[b"CLIENT", b"REPLY", b"OFF"], [b"PING"]],
    [[b"CLIENT", b"SETNAME", b"a"], [b"SELECT", b"1"], [b"SELECT", b"99"]],
    [[b"AUTH", PASSWORD], [b"CONFIG", b"GET", b"requirepass"]],
]

# Before the password is given, less may be asked: of the first request that is too much nothing is kept.
BYTES = [
    b"*10\r\n",
    b"*11\r\n",
    b"*10\r\n" + b"$1\r\na\r\n" * 10,
    b"*11\r\n" + b"$1\r\na\r\n" * 11,
    b"*2\r\n$4\r\nAUTH\r\n$16384\r\n" + b"x" * 16384 + b"\r\n",
    b"*2\r\n$4\r\nAUTH\r\n$16385\r\n",
    b"*2147483648\r\n",
    b"*2\r\n$4\r\nAUTH\r\n$536870913\r\n",
    b"*x\r\n",
    b"AUTH 's3cret pass'\r\nGET plain\r\n",
    b"AUTH s3cret pass\r\nGET plain\r\n",
    b'AUTH "s3cret\\x20pass"\r\n' + b"*11\r\n" + b"$1\r\na\r\n" * 11,
    request("AUTH", PASSWORD) + b"*11\r\n" + b"$6\r\nEXISTS\r\n" + b"$5\r\nplain\r\n" * 10,
    request("AUTH", PASSWORD) + b"*2\r\n$4\r\nECHO\r\n$16385\r\n" + b"x" * 16385 + b"\r\n",
    request("AUTH", b"wrong") + b"*11\r\n" + b"$6\r\nEXISTS\r\n" + b"$5\r\nplain\r\n" * 10,
    b"ECHO " + b"x" * 20_000 + b"\r\n",
    b"POST / HTTP/1.1\r\n",
]


@pytest.mark.parametrize(
    "pipeline", PIPELINES, ids=lambda pipeline: str([b" ".join(words).decode("latin-1") for words in pipeline])
)
def test_auth_equals_redis(locked_pair: Pair, pipeline: list[Words]) -> None:
    locked_pair.check(pipeline)


@pytest.mark.parametrize("data", BYTES, ids=lambda data: repr(data[:60]))
def test_limits_before_login_equal_redis(locked_pair: Pair, data: bytes) -> None:
    locked_pair.check_bytes(data)
    locked_pair.check_bytes(data + b"PING\r\n")


def test_login_ends_limits_of_clients(locked_pair: Pair) -> None:
    data = requests([[b"AUTH", PASSWORD], [b"EXISTS", *[b"plain"] * 12], [b"RESET"], [b"PING"]])
    whole = locked_pair.check_bytes(data)
    for cut in range(1, len(data), 3):
        assert locked_pair.check_bytes(data, [cut], 0.001) == whole


def test_every_command_needs_password_as_at_redis(locked_pair: Pair, live_table: dict[str, object]) -> None:
    """Each with as many arguments as it needs at least; what both run without a password changes nothing."""
    open_to_all = {"auth", "hello", "quit", "reset"}
    pipeline: list[Words] = []
    for name, entry in load(REFERENCE).items():
        if name in live_table and name not in open_to_all and "subcommands" not in entry:
            pipeline.append([name.encode(), *[b"1"] * (abs(entry["arity"]) - 1)])  # type: ignore[arg-type]
    assert len(pipeline) > 200
    locked_pair.check([words for words in pipeline if len(words) <= 10])
