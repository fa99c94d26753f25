"""The tables of options in docs/ are those of the table of settings."""

from __future__ import annotations

import re

import pytest

from resp_server.settings.programs import TABLE
from scripts import settings_page

PAGES = settings_page.tables()
NOT_IN_TABLES = {"server-timeout", "serve", "linger"}  # of a proxy, in prose; of `sparkis attach`, on its page


@pytest.mark.parametrize("name", PAGES)
def test_tables_of_page_are_those_of_settings(name: str) -> None:
    text = (settings_page.DOCS / name).read_text()
    assert settings_page.page(name, text) == text, "run `make settings`"


def test_every_option_and_every_keyword_is_in_table() -> None:
    text = "\n".join(made for tables in PAGES.values() for made in tables.values())
    shown = [row for row in TABLE if row.help is not None and row.option not in NOT_IN_TABLES]
    assert [row.option for row in shown if row.option and f"`--{row.option}" not in text] == []
    assert [row.keyword for row in TABLE if row.keyword and f"`{row.keyword}=`" not in text] == []
    for group in settings_page.GROUPS:
        missing = [row.name for row in settings_page.rows_of(group) if not named(group.__name__, row.name, text)]
        assert missing == []


def named(group: str, field: str, text: str) -> bool:
    return f"`{group}({field}=)`" in text or (field == "url" and f"`{group}(URL)`" in text)


def test_page_without_place_of_table_is_error() -> None:
    with pytest.raises(ValueError, match=re.escape("docs/tls.md has 0 places for the table tls")):
        settings_page.page("tls.md", "# TLS\n")
