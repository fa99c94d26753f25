"""The page about the registry and its servers names the options that there are."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from resp_server.programs import registry, state_server
from resp_server.settings.programs import LISTENING, rows_for
from resp_server.settings.setting import STATE_SERVER

REDIS_OPTIONS = {f"--{row.option}" for row in rows_for(STATE_SERVER, "redis")}
PAGE = (Path(__file__).parents[3] / "docs" / "cluster.md").read_text()


def options_of(add: Callable[[argparse.ArgumentParser], None]) -> set[str]:
    parser = argparse.ArgumentParser()
    add(parser)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    return {action.option_strings[0] for action in shown}


def rows_of(command: str) -> set[str]:
    section = PAGE.partition(f"### `sparkis {command}`\n")[2].partition("\n#")[0]
    return set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE))


def test_every_option_of_a_registry_is_on_the_page_and_no_other() -> None:
    assert rows_of("registry") == options_of(registry.add_options)


def test_every_option_of_a_state_server_is_on_the_page_or_is_as_for_any_server() -> None:
    as_for_any = {f"--{row.option}" for row in rows_for(STATE_SERVER, *LISTENING)} - {"--port"} - REDIS_OPTIONS
    assert rows_of("state-server") | as_for_any == options_of(state_server.add_options) - REDIS_OPTIONS
    section = PAGE.partition("### `sparkis state-server`\n")[2].partition("\n|")[0]
    assert as_for_any == set(re.findall(r"--[a-z-]+", section))
