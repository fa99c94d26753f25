"""The endpoint and the names of a page, from its options."""

from __future__ import annotations

import argparse

import pytest

from sparkis_ui import client, command, serving


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return parser.parse_args(words)


def test_default_endpoint_is_server_of_this_machine() -> None:
    endpoint = serving.endpoint_of(options())
    assert (endpoint.url, endpoint.tls) == ("redis://127.0.0.1:7379", None)


def test_files_of_tls_are_those_of_endpoint() -> None:
    given = options(
        "--url", "rediss://h", "--tls-ca-cert-file", "ca.pem", "--tls-cert-file", "c", "--tls-key-file", "k"
    )
    assert serving.endpoint_of(given).tls == {"ssl_ca_certs": "ca.pem", "ssl_certfile": "c", "ssl_keyfile": "k"}


def test_password_of_url_is_for_this_machine_only() -> None:
    assert serving.endpoint_of(options("--url", "redis://:secret@h")).password == "secret"
    with pytest.raises(ValueError, match="would sign in everybody") as raised:
        serving.endpoint_of(options("--url", "redis://:secret@h", "--bind", "0.0.0.0"))
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("address", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("host.example", False),
    ],
)
def test_addresses_of_this_machine_are_known(address: str, is_local: bool) -> None:
    assert serving.is_loopback(address) is is_local


def test_password_may_be_in_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(client.PASSWORD_VARIABLE, "of the environment")
    assert serving.endpoint_of(options()).password == "of the environment"
    assert serving.endpoint_of(options("--url", "redis://:given@h")).password == "given"
    with pytest.raises(ValueError, match="SPARKIS_PASSWORD would sign in everybody"):
        serving.endpoint_of(options("--bind", "0.0.0.0"))


def test_browsers_may_ask_for_given_names_and_this_machine() -> None:
    assert serving.names("10.0.0.1", ["page.example"]) == ["localhost", "127.0.0.1", "::1", "10.0.0.1", "page.example"]


def test_both_files_of_certificate_are_needed() -> None:
    with pytest.raises(ValueError, match="belong together"):
        serving.serve(options("--page-cert-file", "page.pem"))
