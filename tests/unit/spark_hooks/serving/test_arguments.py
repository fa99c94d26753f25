"""The arguments of `sparkis.serve`: groups, and the error for a field of a group that is given as a keyword."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

import sparkis
from resp_server.settings.server import OUTPUT_LIMITS
from resp_server.settings.setting import rows_of
from spark_hooks.serving.arguments import FIELDS, GROUPS, KEYWORDS, _limit_arguments, check_groups

PLACES = {"Driver": sparkis.Driver, "Executors": sparkis.Executors}


def test_keywords_are_those_of_table_and_groups() -> None:
    keywords = inspect.signature(sparkis.serve).parameters
    assert set(keywords) == {"spark", *KEYWORDS, *GROUPS}
    assert len(keywords) <= 14


@pytest.mark.parametrize("name", FIELDS)
def test_field_of_group_as_keyword_is_error_that_names_group(name: str) -> None:
    session: Any = None
    with pytest.raises(TypeError) as raised:
        sparkis.serve(session, **{name: "x"})
    text = str(raised.value)
    found = re.fullmatch(rf"serve\(\) has no keyword {name}: write (\w+)=(\w+)\((?:URL, )?(\w+)=...\)", text)
    assert found, text
    group = (GROUPS | PLACES)[found[1] if found[1] in GROUPS else found[2]]
    assert group.__name__ == found[2]
    assert found[3] in {row.name for row in rows_of(group)}
    assert raised.value.__cause__ is None and raised.value.__context__ is None


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"upstream": "redis://user:secret@cache"}, "upstream is a group, not a str: write upstream=Upstream(URL, own"),
        ({"tls": {"cert_file": "a"}}, "tls is a group, not a dict: write tls=Tls(...)"),
        ({"limits": "a=1"}, "limits is a group, not a str: write limits=Limits(...)"),
    ],
)
def test_value_in_place_of_group_is_refused_and_not_shown(given: dict[str, Any], error: str) -> None:
    with pytest.raises(TypeError, match=re.escape(error)) as raised:
        check_groups(**given)
    assert "secret" not in str(raised.value)


def test_limits_that_differ_from_defaults_become_options() -> None:
    assert _limit_arguments(sparkis.Limits()) == []
    limits = sparkis.Limits(
        rates="a=1", maxclients=50, client_output_buffer_limit=OUTPUT_LIMITS | {"pubsub": (1 << 20, 0, 0)}
    )
    assert _limit_arguments(limits) == [
        "--maxclients=50",
        "--client-output-buffer-limit=normal 1073741824 0 0 pubsub 1048576 0 0",
    ]


def test_url_with_password_is_in_no_representation() -> None:
    assert "secret" not in repr(sparkis.Upstream("redis://:secret@cache", ownership="owners.json"))


@pytest.mark.parametrize("group", [*GROUPS.values(), *PLACES.values()])
def test_help_of_group_explains_each_field(group: type[Any]) -> None:
    explained = re.findall(r"^    (\w+): \S", inspect.getdoc(group) or "", re.MULTILINE)
    assert explained == list(group.__dataclass_fields__)
