"""The section of the page about serving that is about proxies names their options."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from resp_server.programs.proxy import add_options as add_proxy_options
from resp_server.settings.programs import rows_for
from resp_server.settings.setting import SERVE

REDIS_OPTIONS = {f"--{row.option}" for row in rows_for(SERVE, "redis")}
DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "serving.md").read_text()


def test_every_option_of_proxy_is_in_its_section() -> None:
    parser = argparse.ArgumentParser()
    add_proxy_options(parser)
    shown = [action for action in parser._actions if action.help != argparse.SUPPRESS and action.dest != "help"]
    section = PAGE.partition("\n## A proxy\n")[2]
    assert {each.option_strings[0] for each in shown} - REDIS_OPTIONS <= set(re.findall(r"--[a-z-]+", section))
