"""Which roles a server at an upstream's address may have."""

from __future__ import annotations

from resp_server.backends.redis.role import RoleCheck

MASTER = b"*3\r\n$6\r\nmaster\r\n:0\r\n*0\r\n"
REPLICA = b"*5\r\n$5\r\nslave\r\n$1\r\nh\r\n:1\r\n$9\r\nconnected\r\n:0\r\n"
REFUSED = "it is a replica now, not the master"


def test_replica_is_refused_after_master_was_there() -> None:
    check = RoleCheck()
    assert [check.refusal(b"ROLE", reply) for reply in (REPLICA, MASTER, REPLICA, MASTER)] == ["", "", REFUSED, ""]


def test_replica_named_by_sentinels_is_refused_at_start() -> None:
    assert RoleCheck(must_be_master=True).refusal(b"ROLE", REPLICA) == REFUSED


def test_user_without_right_to_ask_and_other_replies_are_accepted() -> None:
    check = RoleCheck(must_be_master=True)
    assert check.refusal(b"ROLE", b"-NOPERM no\r\n") == "" and check.refusal(b"PING", REPLICA) == ""
