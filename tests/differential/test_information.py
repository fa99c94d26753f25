"""INFO, CONFIG GET, CLIENT LIST: each server's own values, under the names that clients look for."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from compat.conformance.judge import CLIENT_IDENTITY, Deviations, client_lines, info_fields, mismatches
from compat.conformance.pair import Pair

CLIENT_INFO = [[b"HELLO", b"3"], [b"CLIENT", b"INFO"]]
COUNTED_BY_USE = ("cmdstat_*", "latency_percentiles_*", "errorstat_*")


def info(pair: Pair, *sections: bytes) -> tuple[dict[str, str], dict[str, str]]:
    """Return INFO's fields: Redis', and ours."""
    (theirs,), (ours,) = pair.replies_to([[b"INFO", *sections]])
    return info_fields(theirs), info_fields(ours)


def config(pair: Pair) -> tuple[dict[str, str], dict[str, str]]:
    """Return all settings: Redis', and ours."""
    flat = [reply.plain for (reply,) in pair.replies_to([[b"CONFIG", b"GET", b"*"]])]
    theirs, ours = (dict(zip(each[::2], each[1::2], strict=True)) for each in flat)
    return _texts(theirs), _texts(ours)


def _texts(settings: dict[bytes, bytes]) -> dict[str, str]:
    return {name.decode(): value.decode() for name, value in settings.items()}


def lasting(names: set[str]) -> set[str]:
    """Return the names without those that come and go with what clients do."""
    return {name for name in names if not any(fnmatchcase(name, pattern) for pattern in COUNTED_BY_USE)}


def test_pattern_of_settings_ends_at_zero_byte_and_name_does_not(pair: Pair) -> None:
    pair.check([[b"CONFIG", b"GET", each] for each in (b"**\0[1^", b"max*-policy\0[", b"\0")])
    for name in (b"databases\0x", b"port\0*"):
        # Redis hashes the whole name, and compares it up to the zero byte: by chance it finds a setting.
        _, (ours,) = pair.replies_to([[b"CONFIG", b"GET", name]])
        assert ours.plain == []


def test_no_field_of_info_is_missing(pair: Pair) -> None:
    theirs, ours = info(pair, b"everything")
    assert lasting(theirs.keys() - ours.keys()) == set()


def test_fields_of_info_that_are_added_are_listed(pair: Pair, deviations: Deviations) -> None:
    theirs, ours = info(pair, b"everything")
    assert mismatches(deviations.info_added, lasting(ours.keys() - theirs.keys())) == []


def test_fields_of_info_come_in_redis_order(pair: Pair) -> None:
    theirs, ours = info(pair)
    assert [name for name in ours if name in theirs] == [name for name in theirs if name in ours]


def test_info_has_numbers_for_numbers_of_redis(pair: Pair) -> None:
    theirs, ours = info(pair, b"everything")
    common = [name for name in theirs if name in ours]
    assert [name for name in common if _is_number(theirs[name]) != _is_number(ours[name])] == ["redis_build_id"]


def _is_number(text: str) -> bool:
    try:
        return float(text) == float(text)
    except ValueError:
        return False


@pytest.mark.parametrize(
    "section",
    [b"server", b"clients", b"memory", b"persistence", b"stats", b"replication", b"cpu", b"cluster", b"keyspace"],
)
def test_section_of_info_alone_has_fields_of_that_section(pair: Pair, section: bytes) -> None:
    (theirs,), (ours,) = pair.replies_to([[b"INFO", section]])
    assert ours.value.split(b"\r\n")[0] == theirs.value.split(b"\r\n")[0]
    assert info_fields(ours).keys() & info(pair)[0].keys() <= info_fields(theirs).keys()


def test_info_counts_keys_as_redis_does(pair: Pair) -> None:
    theirs, ours = info(pair, b"keyspace")
    assert theirs["db0"].partition(",avg_ttl")[0] == ours["db0"].partition(",avg_ttl")[0]


def test_missing_settings_are_listed(pair: Pair, deviations: Deviations) -> None:
    theirs, ours = config(pair)
    assert mismatches(deviations.config_missing, theirs.keys() - ours.keys()) == []


def test_added_settings_are_listed(pair: Pair, deviations: Deviations) -> None:
    theirs, ours = config(pair)
    assert mismatches(deviations.config_added, ours.keys() - theirs.keys()) == []


def test_settings_that_differ_are_listed(pair: Pair, deviations: Deviations) -> None:
    theirs, ours = config(pair)
    differing = {name for name in ours.keys() & theirs.keys() if ours[name] != theirs[name]}
    assert mismatches(deviations.config_values, differing) == []


def test_fields_of_clients_that_differ_are_listed(pair: Pair, deviations: Deviations) -> None:
    pipeline = [*CLIENT_INFO, *([[b"HGETALL", b"hash:edge"]] * 30), [b"CLIENT", b"INFO"]]
    theirs, ours = (client_lines(replies[-1])[0] for replies in pair.replies_to(pipeline))
    differing = {name for name in ours if theirs.get(name) != ours[name]} - set(CLIENT_IDENTITY)
    assert mismatches(deviations.client_values, differing) == []


@pytest.mark.parametrize("option", [[], [b"TYPE", b"normal"]])
def test_list_of_clients_has_line_for_this_one(pair: Pair, option: list[bytes]) -> None:
    pipeline = [[b"CLIENT", b"SETNAME", b"me"], [b"SELECT", b"3"], [b"CLIENT", b"LIST", *option], [b"CLIENT", b"ID"]]
    theirs, ours = (
        next(line for line in client_lines(replies[2]) if line["id"] == str(replies[3].value))
        for replies in pair.replies_to(pipeline)
    )
    assert pair.judge.is_same_client(theirs, ours)
    assert (ours["name"], ours["db"]) == ("me", "3")


def test_replica_is_replica_to_its_clients(replica_pair: Pair) -> None:
    replica_pair.check([[b"HELLO", b"3"], [b"HELLO"]])
    theirs, ours = info(replica_pair, b"replication")
    assert [name for name in ours if name in theirs] == [name for name in theirs if name in ours]
    assert ours["role"] == theirs["role"] == "slave"
    assert {name for name in theirs if name.startswith(("master_", "slave_"))} - ours.keys() <= {
        "master_link_down_since_seconds",
        "master_sync_total_bytes",
    }
    (their_role,), (our_role,) = replica_pair.replies_to([[b"ROLE"]])
    assert [part.type for part in our_role.value] == [part.type for part in their_role.value]


def test_info_counts_itself_when_it_has_run(pair: Pair) -> None:
    """Within a transaction, the general path answers it."""
    lines = [[b"MULTI"], [b"CONFIG", b"RESETSTAT"], *[[b"INFO", b"commandstats"]] * 2, [b"EXEC"]]
    for replies in pair.replies_to(lines):
        _, first, second = replies[-1].value
        counts = [info_fields(each).get("cmdstat_info", "").partition(",")[0] for each in (first, second)]
        assert counts == ["", "calls=1"]
