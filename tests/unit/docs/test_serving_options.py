"""The page about serving names the options that there are."""

from __future__ import annotations

import argparse
import inspect
import re
from pathlib import Path

from resp_server.programs.proxy import add_options as add_proxy_options
from resp_server.programs.serve import add_options
from resp_server.settings.programs import rows_for
from resp_server.settings.setting import SERVE
from spark_hooks.serving.serve import serve

REDIS_OPTIONS = {f"--{row.option}" for row in rows_for(SERVE, "redis")}
DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "serving.md").read_text()
PLACEMENT = (DOCS / "placement.md").read_text()


def test_every_option_of_the_command_is_on_the_page_and_no_other() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    assert (
        set(re.findall(r"^\| `(--[a-z-]+)", PAGE, re.MULTILINE))
        == {each.option_strings[0] for each in shown} - REDIS_OPTIONS
    )


def test_every_setting_of_redis_is_on_the_page_of_configuration_and_no_other() -> None:
    page = (DOCS / "configuration.md").read_text()
    assert set(re.findall(r"^\| `(--[a-z-]+)", page, re.MULTILINE)) == REDIS_OPTIONS


def test_every_argument_of_the_function_is_on_the_page_or_on_that_of_placement_and_no_other() -> None:
    given = set(inspect.signature(serve).parameters) - {"spark"}
    beside_the_driver = set(re.findall(r"^\| (?:`--[^|]*(?:\\\|[^|]*)*)?\| `([a-z_]+)=` \|", PAGE, re.MULTILINE))
    on_executors = set(re.findall(r"^\| `([a-z_]+)=` \| `spark\.sparkis\.", PLACEMENT, re.MULTILINE))
    assert beside_the_driver | on_executors == given
    assert not beside_the_driver & on_executors


def test_every_option_of_a_proxy_is_in_its_section() -> None:
    parser = argparse.ArgumentParser()
    add_proxy_options(parser)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    section = PAGE.partition("\n## A proxy\n")[2]
    assert {each.option_strings[0] for each in shown} - REDIS_OPTIONS <= set(re.findall(r"--[a-z-]+", section))
