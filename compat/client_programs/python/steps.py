"""What both programs share: the address, the lines of their steps, and requests to the runner."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from os import environ
from time import monotonic, sleep
from typing import Any

import redis

PLACE = environ["PLACE"]
# How many texts the states have: job:text:000 to job:text:299, each with its number.
TEXTS = 300
# Longer than any wait on a busy machine; it ends a hang.
WAIT_S_MAX = 120.0
SCRIPT = "redis.call('SET', KEYS[1], ARGV[1]) return redis.call('GET', KEYS[1])"


def address() -> dict[str, Any]:
    """Return the arguments of a client."""
    at: dict[str, Any] = {"host": environ["REDIS_HOST"], "port": int(environ["REDIS_PORT"]), "decode_responses": True}
    if PLACE == "tls":
        at |= {"ssl": True, "ssl_ca_certs": environ["REDIS_CA"]}
        at |= {"username": environ["REDIS_USER"], "password": environ["REDIS_PASSWORD"]}
    return at


def text(number: int) -> str:
    return f"job:text:{number:03}"


def all_texts() -> list[str]:
    return [text(number) for number in range(TEXTS)]


def step(name: str, body: Callable[[], Any]) -> None:
    """Print what a step returns, or its error."""
    try:
        result = repr(body())
    except redis.RedisError as error:
        result = error_text(error)
    print(f"{name}: {result}", flush=True)


async def async_step(name: str, body: Callable[[], Awaitable[Any]], errors: type[Exception] = redis.RedisError) -> None:
    """Print what a coroutine returns, or its error. errors: the client's."""
    try:
        result = repr(await body())
    except errors as error:
        result = error_text(error)
    print(f"{name}: {result}", flush=True)


def error_text(error: Exception) -> str:
    """Return an error's type and text, without ports, and without the text of NOPERM, which Redis 7.4 has changed."""
    text = re.sub(r"(?<=127\.0\.0\.1:)\d+", "PORT", f"{type(error).__name__}: {error}")
    return re.sub(r"((NoPermissionError|PermissionDenied): ).*", r"\1NOPERM", text)


def ask(*words: str) -> None:
    """Ask the runner to put or delete a state's key, or to kill the server that has a key; wait until it is done."""
    print("!", *words, flush=True)
    input()


def until_equal(find: Callable[[], Any], expected: Any) -> Any:
    """Call until the result is the expected one, and return it; errors meanwhile are no results."""
    end = monotonic() + WAIT_S_MAX
    while True:
        try:
            found = find()
        except redis.RedisError as error:
            found = error_text(error)
        if found == expected or monotonic() > end:
            return found
        sleep(0.01)


async def async_until_equal(
    find: Callable[[], Awaitable[Any]], expected: Any, errors: type[Exception] = redis.RedisError
) -> Any:
    """Call until the result is the expected one, and return it; errors meanwhile are no results."""
    end = monotonic() + WAIT_S_MAX
    while True:
        try:
            found = await find()
        except errors as error:
            found = error_text(error)
        if found == expected or monotonic() > end:
            return found
        await asyncio.sleep(0.01)
