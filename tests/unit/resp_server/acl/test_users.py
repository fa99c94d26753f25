"""The ACL file, and what rules come to."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from resp_server.acl.rate_limits import RateLimit
from resp_server.acl.user import User
from resp_server.acl.users import NO_FILE, NOT_SAVED, AccessError, UserChange, UserChangeResult, Users
from resp_server.acl.visibility import Coverage, can_see_job, coverage_of
from resp_server.commands import command_table
from state_backend.model.descriptor import KeyFormat

TABLE = command_table()
UNKNOWN = "{{}}:2: Error in applying operation '{}': Unknown command or category name in ACL. "
UNCHANGED = "WARNING: ACL errors detected, no change to the previously active ACL rules was performed"


def users(path: Path, text: str) -> Users:
    path.write_text(text)
    return Users(TABLE, path=str(path))


def test_reloaded_file_replaces_users_and_keeps_objects_of_unchanged_ones(tmp_path: Path) -> None:
    made = users(tmp_path / "acl", "user default off\n\nuser a on >x ~a:* +get\r\n")
    default = made.default
    made.load()
    assert [each.name for each in made] == [b"a", b"default"]
    assert made.default is default
    assert not default.is_open
    first = made.get(b"a")
    Path(str(made.path)).write_text("user a on nopass (+get ~b:* &c)\n")
    made.load()
    assert made.get(b"a") is first
    assert first is not None
    assert first.text == b"on nopass sanitize-payload resetchannels -@all (~b:* resetchannels &c -@all +get)"
    assert default.is_open  # a file that does not name it gives it every right


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("usr a on", "{}:2 should start with user keyword followed by the username. "),
        ("user", "{}:2 should start with user keyword followed by the username. "),
        ("user a on", "WARNING: Duplicate user 'a' found on line 2. "),
        ("user b\tc on", "'{}:2: username 'b\tc' contains invalid characters. "),
        ("user b +no -nor", f"{UNKNOWN.format('+no')}{UNKNOWN.format('-nor')}"),
        ("user b nonsense more", "{}:2: Syntax error. "),
        ("user b (+get", "{}:2: Unmatched parenthesis in selector definition."),
    ],
)  # fmt: skip
def test_wrong_file_of_users_names_its_lines_and_changes_nothing(tmp_path: Path, line: str, error: str) -> None:
    made = users(tmp_path / "acl", f"user a on\n{line}\n")
    with pytest.raises(AccessError) as raised:
        made.load()
    assert str(raised.value) == error.replace("{}", str(made.path)) + UNCHANGED
    assert [each.name for each in made] == [b"default"]


def test_missing_acl_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=r"^Error loading ACLs, opening file '.*/none': No such file or directory$"):
        Users(TABLE, path=str(tmp_path / "none")).load()


def test_saved_users_are_loaded_without_plain_passwords(tmp_path: Path) -> None:
    path = tmp_path / "acl"
    made = Users(TABLE, "first", str(path))
    made.set(b"a", [b"on", b">second", b"%RW~*", b"~a", b"(+mget %R~b:*)", b"+config|get", b"-@dangerous"])
    made.save()
    assert path.stat().st_mode & 0o777 == 0o600
    assert not any(secret in path.read_text() for secret in ("first", "second"))
    again = Users(TABLE, path=str(path))
    again.load()
    assert again.rules == made.rules
    assert again.log_in(b"a", b"second") is again.get(b"a")
    assert again.log_in(b"default", b"first") is again.default
    for name, password in ((b"a", b"first"), (b"a", b""), (b"nobody", b"second")):
        assert again.log_in(name, password) is None


def test_disabled_user_cannot_log_in(tmp_path: Path) -> None:
    made = Users(TABLE)
    made.set(b"a", [b">x"])
    assert made.log_in(b"a", b"x") is None


@pytest.mark.parametrize(
    ("patterns", "key_format", "reach"),
    [
        (["job:*"], "job:state:<k>", Coverage.ALL),
        (["*"], "job:state:<k>", Coverage.ALL),
        (["job:state:a*"], "job:state:<k>", Coverage.SOME),
        (["job:*:1"], "job:state:<k>", Coverage.SOME),
        (["other:*", "job:s*"], "job:state:<k>", Coverage.ALL),
        (["jobs:*"], "job:state:<k>", Coverage.NOTHING),
        (["job"], "job:state:<k>", Coverage.NOTHING),
        (["j\\ob:*"], "job:state:<k>", Coverage.ALL),
        (["j[o]b:*"], "job:state:<k>", Coverage.SOME),
        (["total"], "total", Coverage.SOME),
        (["totals"], "total", Coverage.NOTHING),
        ([], "total", Coverage.NOTHING),
    ],
)
def test_patterns_reach_all_some_or_none_of_states_keys(patterns: list[str], key_format: str, reach: Coverage) -> None:
    assert coverage_of([each.encode() for each in patterns], KeyFormat.parse(key_format)) is reach


def test_user_is_notified_of_jobs_that_its_patterns_may_match() -> None:
    user = User(b"u")
    for rule in (b"~mine:*", b"%W~other:*"):
        user.apply(rule)
    assert [can_see_job(user, job) for job in ("mine", "other", "min", "mined")] == [True, False, False, False]
    assert can_see_job(User.default(), "any")


def test_proxies_and_nodes_log_in_by_their_own_password_with_any_file(tmp_path: Path) -> None:
    path = tmp_path / "acl"
    path.write_text("user default off >x\nuser a on >secret ~a:* +get\n")
    made = Users(TABLE, path=str(path), server_password="secret")
    made.load()
    server_user = made.log_in(b"default", b"secret")
    assert server_user is not None and server_user is not made.default
    assert server_user.is_unrestricted and not server_user.is_open and made.is_current(server_user)
    assert made.log_in(b"default", b"x") is None  # it is off
    assert made.log_in(b"a", b"secret") is made.get(b"a")
    assert [each.name for each in made] == [b"a", b"default"]
    made.load()
    assert made.is_current(server_user) and made.log_in(b"default", b"secret") is server_user
    made.save()
    assert b"~*" not in path.read_bytes()


def test_no_part_logs_in_without_password_of_parts(tmp_path: Path) -> None:
    made = users(tmp_path / "acl", "user default off\n")
    made.load()
    assert made.log_in(b"default", b"") is None
    gone = made.log_in(b"a", b"")
    assert gone is None and made.is_current(made.default)


def test_change_in_one_process_is_adopted_by_another(tmp_path: Path) -> None:
    limits = [RateLimit("a", 10)]
    one, other = (Users(TABLE, path=str(tmp_path / "acl"), limits=limits) for _ in range(2))
    set_a = one.change({"set": ["a\xff", "on", ">x", "(~b:*", "+get)"]})
    assert set_a.to_json() == {"error": None, "names": ["a\xff"]}
    one.change({"set": ["a", "on"]})
    other.adopt(one.rules)
    assert [user.text for user in other] == [user.text for user in one]
    assert [user.name for user in other] == [b"a", b"a\xff", b"default"]
    for made in (one, other):
        limited, free = made.get(b"a"), made.get(b"a\xff")
        assert limited is not None and limited.rate_limiter is not None and limited.rate_limiter.limit is limits[0]
        assert free is not None and free.rate_limiter is None
    limited = other.get(b"a")
    assert one.change({"save": True}) == UserChangeResult()
    assert one.change({"set": ["a", "+ping"]}).names == ["a"]  # nothing of other users
    other.adopt(one.rules)
    assert limited is other.get(b"a") and limited is not None and limited.text.endswith(b"+ping")
    deleted = one.change({"delete": ["a", "nobody", "a"]})
    assert one.rules_of(deleted.names) == {"a": None}
    other.adopt(one.rules_of(deleted.names))
    assert len(other) == len(one) == 2
    assert other.get(b"a") is None and not other.is_current(limited)
    one.change({"set": ["new", "on"]})
    loaded = one.rules_of(one.change({"load": True}).names)  # `new` was not saved, and `a` was
    assert loaded["new"] is None and loaded["a"] is not None
    other.change({"set": ["new", "on"]})
    other.adopt(loaded)
    assert one.change({"load": True}).names == []  # the file, and the users, are as they were
    one.change({"set": ["a", "off"]})
    assert one.change({"load": True}).names == ["a"]
    assert [user.text for user in other] == [user.text for user in one]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"set": ["b", "nonsense"]}, "Error in ACL SETUSER modifier 'nonsense': Syntax error"),
        ({"set": ["b c", "on"]}, "Usernames can't contain spaces or null characters"),
        ({"set": ["b\0c", "on"]}, "Usernames can't contain spaces or null characters"),
        ({"set": ["b" * 257, "on"]}, "a user's name may have 256 bytes; this one has 257"),
        ({"delete": ["a", "default"]}, "The 'default' user cannot be removed"),
        ({"load": True}, NO_FILE),
        ({"save": True}, NO_FILE),
    ],
)
def test_wrong_change_is_error_and_changes_nothing(change: UserChange, error: str) -> None:
    made = Users(TABLE)
    made.set(b"a", [b"on"])
    before = made.rules
    assert made.change(change) == UserChangeResult(error)
    assert made.rules == before


def test_users_name_may_have_256_bytes() -> None:
    made = Users(TABLE)
    made.set(b"b" * 256, [])
    assert made.get(b"b" * 256) is not None


def test_default_is_changed_as_any_other_user(tmp_path: Path) -> None:
    for made in (Users(TABLE), users(tmp_path / "acl", "user a on\n")):
        if made.path is not None:
            made.load()
        made.set(b"default", [b"-@all", b"+get", b"-@dangerous"])
        assert made.default.text == b"on nopass sanitize-payload ~* &* -@all +get -@dangerous"


def test_user_of_file_without_rules_is_off(tmp_path: Path) -> None:
    made = users(tmp_path / "acl", "user a\n")
    made.load()
    assert next(user.text for user in made) == b"off sanitize-payload resetchannels -@all"


def test_rate_limits_apply_to_users_of_file(tmp_path: Path) -> None:
    (tmp_path / "acl").write_text("user a on\nuser b on\n")
    made = Users(TABLE, path=str(tmp_path / "acl"), limits=[RateLimit("a", 10), RateLimit("default", None, 5)])
    made.load()
    limits = {user.name: user.rate_limiter and user.rate_limiter.limit.user for user in made}
    assert limits == {b"a": "a", b"b": None, b"default": "default"}


def test_password_of_default_replaces_one_before() -> None:
    made = Users(TABLE, "first")
    assert not made.default.is_open
    made.set_password("s\udcff")
    assert made.log_in(b"default", b"first") is None and made.log_in(b"default", b"s\xff") is made.default
    made.set_password(None)
    assert made.default.is_open and made.default.passwords == []


def test_every_wrong_line_of_file_is_named_and_of_line_first_error(tmp_path: Path) -> None:
    path = tmp_path / "acl"
    path.write_bytes(b"\n \t\nuser a nonsense +no more +nor on\nusers\nuser \xe9\0 on\n  user b on\n")
    with pytest.raises(AccessError) as raised:
        Users(TABLE, path=str(path)).load()
    assert (
        str(raised.value)
        == (
            f"{path}:3: Syntax error. "
            f"{path}:3: Error in applying operation '+no': Unknown command or category name in ACL. "
            f"{path}:3: Error in applying operation '+nor': Unknown command or category name in ACL. "
            f"{path}:4 should start with user keyword followed by the username. "
            f"'{path}:5: username '\udce9\0' contains invalid characters. "
        )
        + UNCHANGED
    )


def test_size_of_file_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resp_server.acl.users.FILE_BYTES_MAX", 2 << 20)
    line = "user a on\n"
    made = users(tmp_path / "acl", line + " " * ((2 << 20) - len(line)))
    made.load()
    assert made.get(b"a") is not None
    (tmp_path / "acl").write_text(line + " " * ((2 << 20) + 1 - len(line)))
    with pytest.raises(AccessError, match=r"^Error loading ACLs, file '.*/acl' is larger than 2 MiB$"):
        made.load()


def test_user_of_file_that_is_off_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A user is off unless a rule says `on`, which is easily forgotten."""
    caplog.set_level(logging.INFO)
    users(tmp_path / "acl", "user a >x\nuser b on\nuser c off\n").load()
    assert caplog.messages == [
        f"user '{name}' of {tmp_path}/acl is off: nobody can log in as it" for name in ("a", "c")
    ]


def test_saved_file_of_users_keeps_its_permissions(tmp_path: Path) -> None:
    made = users(tmp_path / "acl", "user a on\n")
    (tmp_path / "acl").chmod(0o640)
    made.save()
    assert (tmp_path / "acl").stat().st_mode & 0o777 == 0o640
    assert [path.name for path in tmp_path.iterdir()] == ["acl"]


def test_unsaveable_users_are_error_and_leave_no_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "acl"
    path.mkdir()  # cannot be replaced by a file
    assert Users(TABLE, path=str(path)).change({"save": True}) == UserChangeResult(NOT_SAVED)
    assert [each.name for each in tmp_path.iterdir()] == ["acl"]
    assert caplog.messages == [f"the users cannot be written to {path}: Is a directory"]
