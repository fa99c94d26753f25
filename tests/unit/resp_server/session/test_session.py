"""The state of a connection as a value."""

from __future__ import annotations

from resp_server.acl.user import User
from resp_server.session.session import ReplyMode, Session


def session(needs_auth: bool = False) -> Session:
    user = User.default()
    if needs_auth:
        user.apply(b">secret")
    return Session(1, "127.0.0.1:1", "127.0.0.1:2", user, 0)


def test_new_session_can_use_fast_path_unless_password_is_needed() -> None:
    assert session().can_use_fast_path
    assert not session(needs_auth=True).can_use_fast_path


def test_every_special_state_leaves_fast_path() -> None:
    selected, silent, closing, entered = session(), session(), session(), session(needs_auth=True)
    selected.select(3)
    silent.set_reply_mode(ReplyMode.OFF)
    closing.close()
    entered.authenticate(entered.default_user)
    assert not (selected.can_use_fast_path or silent.can_use_fast_path or closing.can_use_fast_path)
    assert entered.can_use_fast_path and entered.can_be_forwarded
    assert not (silent.can_be_forwarded or closing.can_be_forwarded)
    assert selected.can_be_forwarded and not selected.can_use_checked_fast_path


def test_reset_keeps_only_id_of_client() -> None:
    changed = session(needs_auth=True)
    changed.authenticate(changed.default_user)
    changed.select(3)
    changed.protocol, changed.name, changed.lib_name = 3, b"me", b"lib"
    changed.restart()
    assert (changed.protocol, changed.db, changed.name, changed.is_authenticated) == (2, 0, b"", False)
    assert (changed.id, changed.lib_name) == (1, b"lib")


def test_skip_silences_itself_and_one_command() -> None:
    skipping = session()
    silences: list[bool] = []
    for _ in range(4):
        skipping.begin_command()
        if not silences:
            skipping.set_reply_mode(ReplyMode.SKIP_NEXT)
        silences.append(skipping.replies_suppressed)
    assert silences == [True, True, False, False]
    assert skipping.can_use_fast_path
