"""The logins in AUTH and HELLO."""

from __future__ import annotations

import pytest

from resp_server.backends.overlay.client_login import login_in


@pytest.mark.parametrize(
    ("line", "login", "rest"),
    [
        ("AUTH secret", ("", "secret"), None),
        ("auth ada secret", ("ada", "secret"), None),
        ("HELLO 3 AUTH ada secret", ("ada", "secret"), "HELLO 3"),
        ("hello 3 SETNAME auth auth ada secret", ("ada", "secret"), "hello 3 SETNAME auth"),
        ("HELLO 2 AUTH ada secret SETNAME n", ("ada", "secret"), "HELLO 2 SETNAME n"),
    ],
)
def test_login_is_found_and_rest_of_hello_is_kept(line: str, login: tuple[str, str], rest: str | None) -> None:
    found = login_in(line.encode().split(b" "))
    assert found is not None and tuple(each.decode() for each in found.login) == login
    assert (None if found.rest is None else b" ".join(found.rest).decode()) == rest


@pytest.mark.parametrize(
    "line", ["HELLO", "HELLO 3", "HELLO 3 SETNAME AUTH", "HELLO 3 AUTH ada", "AUTH", "GET auth a b"]
)
def test_other_requests_have_no_login(line: str) -> None:
    assert login_in(line.encode().split(b" ")) is None
