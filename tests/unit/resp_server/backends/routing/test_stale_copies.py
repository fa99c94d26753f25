"""Only keys that a state owns, at every proxy, are copies that may be deleted."""

from __future__ import annotations

import pytest

from resp_server.backends.routing.stale_copies import Copies, ReportedOwner, UnclearOwnerError

STATE = ReportedOwner("state", "job:speed", "refuse")
UPSTREAM = ReportedOwner("upstream", "", "pass")


def test_key_that_state_owns_is_copy_and_no_other() -> None:
    copies = Copies()
    assert copies.add(b"a", [STATE, STATE]) and copies.add(b"b", [STATE._replace(writes="drop")])
    assert not copies.add(b"c", [UPSTREAM])
    assert not copies.add(b"d", [ReportedOwner("prefer-state", "job:speed", "pass")])
    assert copies.deletable == {"job:speed": 2} and copies.examples == {"job:speed": [b"a", b"b"]}


def test_key_that_program_still_writes_is_left_and_counted() -> None:
    copies = Copies()
    assert not copies.add(b"a", [STATE._replace(writes="pass")])
    assert copies.written == {"job:speed": 1} and not copies.deletable


@pytest.mark.parametrize("other", [UPSTREAM, STATE._replace(writes="pass"), STATE._replace(state="b:c")])
def test_proxies_that_do_not_agree_are_error(other: ReportedOwner) -> None:
    with pytest.raises(UnclearOwnerError, match="the proxies do not agree about the key 'a'"):
        Copies().add(b"a", [STATE, other])


def test_rule_for_unknown_state_is_error() -> None:
    with pytest.raises(UnclearOwnerError, match="no state has such keys"):
        Copies().add(b"a", [STATE._replace(state="")])
