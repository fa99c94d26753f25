"""The group `Upstream` of `sparkis.serve`, as options of the process that answers clients."""

from __future__ import annotations

import re
from argparse import ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resp_server.programs.upstream_options import overlay_of
from resp_server.settings.groups import UPSTREAM_VARIABLE, Upstream
from resp_server.settings.programs import add_settings
from resp_server.settings.setting import PROXY, rows_of

# What the options in errors are here.
NAMES = {f"--{row.option}": f"Upstream.{row.name}" for row in rows_of(Upstream)} | {
    "--upstream": "upstream",
    "--aclfile": "acl_file",
}
OPTION = re.compile(r"(--[a-z-]+)(?: FILE)?")


@dataclass(frozen=True)
class UpstreamOptions:
    """The options about an upstream, validated. The URL may contain a password, so it is on no command line."""

    url: str | None = field(default=None, repr=False)
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, upstream: Upstream | None, password: str | None = None, acl_file: str | None = None) -> UpstreamOptions:
        """Validate a group; ValueError has all mistakes."""
        if upstream is None:
            return cls()
        values = {row.option: getattr(upstream, row.name) for row in rows_of(Upstream) if row.name != "url"}
        defaults = {row.option: row.default for row in rows_of(Upstream)}
        given = {option: value for option, value in values.items() if value != defaults[option]}
        arguments = [f"--{option}={each}" for option, value in given.items() for each in _each(value)]
        parser = ArgumentParser(exit_on_error=False)
        add_settings(parser, PROXY, "upstream")
        try:
            options = parser.parse_args(arguments)
            # The clients' options matter, because with auth='client' the upstream has the users.
            options.upstream, options.requirepass, options.requirepass_file = upstream.url, password, None
            options.aclfile = acl_file
            overlay_of(options)
        except (ArgumentError, ValueError) as error:
            raise ValueError(OPTION.sub(lambda found: NAMES.get(found[1], found[1]), str(error))) from None
        return cls(upstream.url, tuple(arguments))

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the process, with this URL in place of an inherited one."""
        others = {name: value for name, value in inherited.items() if name != UPSTREAM_VARIABLE}
        return others if self.url is None else others | {UPSTREAM_VARIABLE: self.url}


def _each(value: str | int | Path | Sequence[str]) -> Sequence[object]:
    """Return the values of an option, one for each time that it is given."""
    return (value,) if isinstance(value, str | int | Path) else value
