"""What the page's client may send, and its endpoints and errors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis.exceptions

from resp_server.commands import command_table
from sparkis_ui import client
from sparkis_ui.client import Endpoint, NotAllowedError

ENDPOINT = Endpoint("h", 1, "user", "secret")


def allowed() -> Iterator[str]:
    """Yield the full name of each command that the page may send."""
    for name, subcommands in client.ALLOWED.items():
        yield from (f"{name}|{each}".lower() for each in subcommands)
        if not subcommands:
            yield name.lower()


@pytest.mark.parametrize("name", sorted(allowed()))
def test_command_of_page_changes_no_key_and_no_setting(name: str) -> None:
    command = command_table().get(name.encode())
    assert command is not None
    assert "write" not in command.facts.flags
    # Those of an administrator only list.
    if "admin" in command.facts.flags:
        assert name in ("client|list", "latency|latest", "slowlog|get", "state|shadow")


@pytest.mark.parametrize(
    "words",
    [
        ("SET", "k", "v"),
        (b"del", b"k"),
        ("CONFIG", "SET", "a", "b"),
        ("CONFIG SET", "a", "b"),
        ("CONFIG", "GET", "*"),
        ("CLIENT", "KILL", "1"),
        ("CLIENT KILL", "1"),
        ("CLIENT",),
        ("STATE", "RELEASE", "j"),
        ("STATE", b"publish", b"CHANNEL"),
        ("SLOWLOG", "RESET"),
        ("KEYS", "*"),
        ("EVAL", "return 1", "0"),
        ("MULTI",),
        ("ACL", "LIST"),
    ],
)
def test_any_other_command_is_refused_before_it_is_sent(words: tuple[str | bytes, ...]) -> None:
    with pytest.raises(NotAllowedError):
        client.check(words)
    for kind in (client.PlainConnection, client.TlsConnection):
        connection = kind(**ENDPOINT.connection_options(protocol=3))
        with pytest.raises(NotAllowedError):
            connection.pack_command(*words)
        with pytest.raises(NotAllowedError):
            connection.pack_commands([("PING",), words])


def test_commands_of_list_are_packed_as_they_are() -> None:
    connection = client.PlainConnection(**ENDPOINT.connection_options(protocol=3))
    assert b"".join(connection.pack_command("client", "list")) == b"*2\r\n$6\r\nclient\r\n$4\r\nlist\r\n"
    assert b"".join(connection.pack_commands([("GETRANGE", b"\xff", 0, 9)])).startswith(b"*4\r\n$8\r\nGETRANGE\r\n")


def test_url_has_user_password_and_tls() -> None:
    made = Endpoint.of_url("rediss://a%40b:p%2Fw@[::1]:7", {"ssl_ca_certs": "ca.pem"})
    assert (made.host, made.port, made.username, made.password) == ("::1", 7, "a@b", "p/w")
    assert made.connection_options(3)["ssl_ca_certs"] == "ca.pem"
    assert made.url == "rediss://[::1]:7"
    assert Endpoint.of_url("redis://h").url == "redis://h:6379"


@pytest.mark.parametrize("url", ["http://h", "h:6379", "redis://", "redis://h:x"])
def test_any_other_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match=f"'{url}' is not a URL of the form redis://"):
        Endpoint.of_url(url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://u:planted@h", "http://***@h"),
        ("u:planted@h", "***@h"),
        ("redis://:planted/x@h:1", "redis://***@h:1"),
        ("redis://:x#planted@h:y", "redis://***@h:y"),
    ],
)
def test_error_about_url_hides_its_password(url: str, shown: str) -> None:
    with pytest.raises(ValueError, match="is not a URL") as error:
        Endpoint.of_url(url)
    assert str(error.value).startswith(repr(shown))
    assert "planted" not in str(error.value)


def test_files_of_tls_have_no_use_without_tls() -> None:
    with pytest.raises(ValueError, match="write rediss://"):
        Endpoint.of_url("redis://h", {"ssl_ca_certs": "ca.pem"})


def test_no_text_of_endpoint_has_its_password() -> None:
    assert "secret" not in repr(ENDPOINT) + ENDPOINT.url + repr(ENDPOINT.as_user("u", "secret"))


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (redis.exceptions.AuthenticationError("WRONGPASS no"), client.SignInError),
        (redis.exceptions.ResponseError("NOAUTH Authentication required."), client.SignInError),
        (redis.exceptions.ConnectionError("refused"), client.LostError),
        (redis.exceptions.TimeoutError(), client.LostError),
        (OSError("no route"), client.LostError),
        (redis.exceptions.ResponseError("NOPERM no"), client.RefusedError),
        (redis.exceptions.ResponseError("LOADING job"), client.RefusedError),
    ],
)
def test_errors_are_of_a_few_kinds(error: Exception, kind: type[Exception]) -> None:
    found = client.error_of(error, ENDPOINT)
    assert type(found) is kind
    assert str(found)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("Error -2 connecting to h:1. Name or service not known.", "Name or service not known"),
        ("Error 1 connecting to h:1. [SSL: WRONG_VERSION_NUMBER] wrong version number (_ssl.c:1006).", "[SSL: WRONG_"),
        ("Connection closed by server.", "Connection closed by server"),
        ("", "no reply in time"),
    ],
)
def test_lost_endpoint_has_reason(text: str, reason: str) -> None:
    found = str(client.error_of(redis.exceptions.ConnectionError(text), ENDPOINT))
    assert found.startswith(f"{ENDPOINT.url} does not answer: {reason}") and not found.endswith(".")


def test_refused_connection_is_reported_as_refused() -> None:
    error = redis.exceptions.ConnectionError("Error 111 connecting to h:1. Connect call failed ('127.0.0.1', 1).")
    error.__context__ = ConnectionRefusedError(111, "Connect call failed ('127.0.0.1', 1)")
    assert str(client.error_of(error, ENDPOINT)) == f"{ENDPOINT.url} does not answer: connection refused"


def test_redirect_names_node() -> None:
    found = client.error_of(redis.exceptions.MovedError("5 other:99"), ENDPOINT)
    assert isinstance(found, client.RedirectError)
    assert (found.host, found.port) == ("other", 99)
