"""The rules that the page about users gives are rules, and do what they are given for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from resp_server.acl.users import Users
from resp_server.commands import command_table

PAGE = (Path(__file__).parents[3] / "docs" / "access.md").read_text()
TABLE = command_table()
ADMIN_COMMANDS = [
    each for one in TABLE for each in (one, *one.subcommands.values()) if "@admin" in each.facts.acl_categories
]


def users_of(path: Path, text: str) -> Users:
    path.write_text(text)
    users = Users(TABLE, path=str(path))
    users.load()
    return users


def test_example_of_users_lets_only_its_admin_affect_all_clients(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```\n(user default .*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    users = users_of(tmp_path / "users.acl", text)
    assert [user.name for user in users if any(user.selectors[0].allows(each) for each in ADMIN_COMMANDS)] == [b"admin"]
    assert users.log_in(b"admin", b"secret") is users.get(b"admin")


@pytest.mark.parametrize("name", [b"get", b"smembers", b"scan", b"ping", b"hello"])
def test_user_of_tenant_reads_its_keys_and_affects_no_other(tmp_path: Path, name: bytes) -> None:
    (rules,) = re.findall(r"give each `(~tenant-job:.*?)`", PAGE)
    users = users_of(tmp_path / "users.acl", f"user default off\nuser tenant on >x {rules}\n")
    tenant = users.get(b"tenant")
    assert tenant is not None
    command = TABLE.get(name)
    assert command is not None
    assert tenant.selectors[0].allows(command)
    assert [each.name for each in ADMIN_COMMANDS if tenant.selectors[0].allows(each)] == []
