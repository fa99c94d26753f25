"""redis-py as users with few rights: whoami, the commands that they may not run, and the management of other users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from compat.conformance.servers import Running

NO_RETRY = {"retry": Retry(NoBackoff(), 0)}


@pytest.fixture(params=[2, 3], ids=["RESP2", "RESP3"])
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"protocol": request.param, "decode_responses": True, **NO_RETRY}


@pytest.fixture
def admin(sparkis: Running, settings: dict[str, Any]) -> Iterator[redis.Redis]:
    with redis.Redis(port=sparkis.port, **settings) as made:
        made.acl_setuser("reader", enabled=True, passwords=["+pass"], keys=["hash:*"], commands=["+hgetall", "+client"])
        yield made
        made.acl_deluser("reader", "other")


def test_user_logs_in_with_its_password_and_no_other(
    sparkis: Running, admin: redis.Redis, settings: dict[str, Any]
) -> None:
    with redis.Redis(port=sparkis.port, username="reader", password="pass", **settings) as reader:
        assert reader.hgetall("hash:one") == {"field": "value"}
        assert reader.client_info()["user"] == "reader"
        with pytest.raises(redis.exceptions.NoPermissionError, match="access a key"):
            reader.hgetall("plain")
        with pytest.raises(redis.exceptions.NoPermissionError, match="User reader has no permissions to run the 'get'"):
            reader.get("hash:one")
    for user, password in (("reader", "wrong"), ("nobody", "pass"), ("default", None)):
        with redis.Redis(port=sparkis.port, username=user, password=password, **settings) as wrong:
            if user == "default":
                assert wrong.ping()
                continue
            with pytest.raises(redis.exceptions.AuthenticationError):
                wrong.ping()


def test_users_are_managed(admin: redis.Redis) -> None:
    assert admin.acl_whoami() == "default"
    assert admin.acl_users() == ["default", "reader"]
    assert admin.acl_setuser("other", enabled=True, nopass=True, categories=["+@read"], keys=["a", "b"], channels=["c"])
    shown = admin.acl_getuser("other")
    assert shown["flags"][:2] == ["on", "nopass"]
    assert (shown["categories"], shown["channels"]) == (["-@all", "+@read"], ["&c"])
    assert admin.acl_dryrun("other", "get", "a") in ("OK", b"OK", True)
    assert "string" in admin.acl_cat()
    assert len(admin.acl_genpass()) == 64
    assert admin.acl_deluser("other") == 1
    assert admin.acl_getuser("other") is None


def test_denials_are_listed(sparkis: Running, admin: redis.Redis, settings: dict[str, Any]) -> None:
    admin.acl_log_reset()
    wrong = redis.Redis(port=sparkis.port, username="reader", password="wrong", **settings)
    with wrong, pytest.raises(redis.exceptions.AuthenticationError):
        wrong.ping()
    (entry,) = admin.acl_log()
    assert (entry["reason"], entry["username"], entry["count"]) == ("auth", "reader", 1)
