"""The page about state servers names the options that they share with other servers."""

from __future__ import annotations

import re
from pathlib import Path

from resp_server.settings.programs import LISTENING, rows_for
from resp_server.settings.setting import STATE_SERVER

REDIS_OPTIONS = {f"--{row.option}" for row in rows_for(STATE_SERVER, "redis")}
PAGE = (Path(__file__).parents[3] / "docs" / "state-servers.md").read_text()


def test_options_that_state_server_shares_with_any_server_are_on_page() -> None:
    as_for_any = {f"--{row.option}" for row in rows_for(STATE_SERVER, *LISTENING)} - {"--port"} - REDIS_OPTIONS
    section = PAGE.partition("### `sparkis state-server`\n")[2].partition("\n<!--")[0]
    assert as_for_any == set(re.findall(r"--[a-z-]+", section))
