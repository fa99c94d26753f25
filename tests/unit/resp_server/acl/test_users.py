"""The ACL file, and what rules come to."""

from __future__ import annotations

from pathlib import Path

import pytest

from resp_server.acl.rules import User
from resp_server.acl.users import AccessError, Users
from resp_server.acl.visibility import Coverage, can_see_job, coverage_of
from resp_server.commands import command_table
from state_backend.model.descriptor import KeyFormat

TABLE = command_table()
UNKNOWN = "{{}}:2: Error in applying operation '{}': Unknown command or category name in ACL. "
UNCHANGED = "WARNING: ACL errors detected, no change to the previously active ACL rules was performed"


def users(path: Path, text: str) -> Users:
    path.write_text(text)
    return Users(TABLE, path=str(path))


def test_a_file_replaces_all_users_and_those_that_stay_stay_the_same_objects(tmp_path: Path) -> None:
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
def test_what_is_wrong_with_a_file_is_told_by_its_lines_and_nothing_changes(
    tmp_path: Path, line: str, error: str
) -> None:
    made = users(tmp_path / "acl", f"user a on\n{line}\n")
    with pytest.raises(AccessError) as told:
        made.load()
    assert str(told.value) == error.replace("{}", str(made.path)) + UNCHANGED
    assert [each.name for each in made] == [b"default"]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(AccessError, match=r"^Error loading ACLs, opening file '.*/none': No such file or directory$"):
        Users(TABLE, path=str(tmp_path / "none")).load()


def test_what_is_saved_is_what_is_loaded_and_has_no_password_in_it(tmp_path: Path) -> None:
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


def test_who_is_off_cannot_log_in_with_the_right_password(tmp_path: Path) -> None:
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
def test_patterns_say_how_much_of_a_states_keys_they_reach(
    patterns: list[str], key_format: str, reach: Coverage
) -> None:
    assert coverage_of([each.encode() for each in patterns], KeyFormat.parse(key_format)) is reach


def test_a_user_hears_of_jobs_that_its_patterns_may_be_about() -> None:
    user = User(b"u")
    for rule in (b"~mine:*", b"%W~other:*"):
        user.apply(rule)
    assert [can_see_job(user, job) for job in ("mine", "other", "min", "mined")] == [True, False, False, False]
    assert can_see_job(User.default(), "any")


def test_proxies_and_nodes_are_let_in_by_a_password_of_their_own_whatever_the_file_says(tmp_path: Path) -> None:
    path = tmp_path / "acl"
    path.write_text("user default off >x\nuser a on >secret ~a:* +get\n")
    made = Users(TABLE, path=str(path), upstream_password="secret")
    made.load()
    upstream = made.log_in(b"default", b"secret")
    assert upstream is not None and upstream is not made.default
    assert upstream.is_unrestricted and not upstream.is_open and made.is_current(upstream)
    assert made.log_in(b"default", b"x") is None  # it is off
    assert made.log_in(b"a", b"secret") is made.get(b"a")
    assert [each.name for each in made] == [b"a", b"default"]
    made.load()
    assert made.is_current(upstream) and made.log_in(b"default", b"secret") is upstream
    made.save()
    assert b"~*" not in path.read_bytes()


def test_without_such_a_password_nobody_is_let_in_by_none(tmp_path: Path) -> None:
    made = users(tmp_path / "acl", "user default off\n")
    made.load()
    assert made.log_in(b"default", b"") is None
    gone = made.log_in(b"a", b"")
    assert gone is None and made.is_current(made.default)
