"""The table of settings: what follows from its rows agrees, for every program."""

from __future__ import annotations

import argparse
import re

import pytest

from resp_server.command.redaction import SECRET_SETTINGS
from resp_server.programs import proxy, registry, serve, state_server
from resp_server.programs.config_reload import APPLIED, LOG_OPTIONS
from resp_server.programs.configuration import options_of
from resp_server.programs.listening import config_of
from resp_server.settings.programs import SECTIONS, TABLE, rows_for
from resp_server.settings.server import ROWS, ServerConfig
from resp_server.settings.setting import SERVERS, Setting

PROGRAMS = {"serve": serve, "proxy": proxy, "registry": registry, "state-server": state_server}


def parser_of(program: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    PROGRAMS[program].add_options(parser)
    return parser


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_option_of_program_is_row(program: str) -> None:
    options = [action.option_strings[0] for action in parser_of(program)._actions if action.dest != "help"]
    assert options == [f"--{row.option}" for row in rows_for(program)]
    shown = [row.option for row in rows_for(program) if row.arguments_in(program)["help"] != argparse.SUPPRESS]
    assert list(options_of(parser_of(program))) == shown


def test_every_row_with_option_is_in_help_of_each_of_its_programs() -> None:
    for row in TABLE:
        assert bool(row.programs) == bool(row.section), row
        assert [program for program in row.programs if row not in rows_for(program)] == []
    assert {program for row in TABLE for program in row.programs} == set(SECTIONS)


@pytest.mark.parametrize("program", SERVERS)
def test_server_without_options_has_defaults_of_fields(program: str) -> None:
    options = parser_of(program).parse_args(["--log", "log"])
    assert config_of(options) == ServerConfig()


def given(row: Setting) -> str:
    """Return a value of an option that is not its default."""
    if row.argument.get("choices"):
        return str(next(each for each in row.argument["choices"] if each != row.arguments_in("serve")["default"]))
    return {"bind": "10.0.0.1", "loglevel": "error", "client-output-buffer-limit": "normal 1mb 0 0"}.get(
        row.option,
        "1048577" if re.search("limit|len|bytes", row.option) else "K$" if "events" in row.option else "5",
    )


@pytest.mark.parametrize("option", [row.option for row in ROWS.values() if row.programs and row.option != "tls-port"])
def test_option_changes_its_field_and_no_other(option: str) -> None:
    (row,) = (each for each in ROWS.values() if each.option == option)
    config = config_of(parser_of("serve").parse_args(["--log", "log", f"--{option}", given(row)]))
    changed = [name for name in ServerConfig.__dataclass_fields__ if getattr(config, name) != row_default(name)]
    assert changed == [row.name]


def row_default(name: str) -> object:
    return getattr(ServerConfig(), name)


@pytest.mark.parametrize("row", [each for each in ROWS.values() if each.is_modifiable], ids=lambda row: row.option)
def test_config_set_accepts_values_of_config_get(row: Setting) -> None:
    assert row.config is not None and row.config.parse is not None
    assert row.joined(row.default, row.config.parse(row.config.render(row.default).encode())) == row.default
    if row.config.in_file is not None:
        assert row.config.parse(row.config.in_file(row.default).encode()) == row.default


def test_sighup_applies_settings_of_config_set_and_two_options() -> None:
    assert APPLIED - {row.option for row in ROWS.values() if row.is_modifiable} == {"requirepass-file", "log-format"}
    assert {"loglevel", "log-format"} == LOG_OPTIONS


def test_secrets_are_hidden_in_all_places() -> None:
    secrets = {each.option for each in TABLE if each.is_secret}
    assert secrets and {name.encode() for name in secrets} <= set(SECRET_SETTINGS)
    assert "hidden from all" not in repr(ServerConfig(password="hidden from all"))
