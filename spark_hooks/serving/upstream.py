"""The arguments of `sparkis.serve` about an upstream, as options of the process that answers clients."""

from __future__ import annotations

import re
from argparse import ArgumentError, ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resp_server.programs.upstream_options import swap_of
from resp_server.settings.groups import UPSTREAM_VARIABLE
from resp_server.settings.programs import add_settings
from resp_server.settings.setting import PROXY

# The arguments whose names differ from those of their options.
ARGUMENTS = {"--upstream-timeout": "upstream_timeout_ms", "--aclfile": "acl_file"}
OPTION = re.compile(r"(--[a-z-]+)(?: FILE)?")


@dataclass(frozen=True)
class UpstreamOptions:
    """The options about an upstream, validated. The URL may contain a password, so it is on no command line."""

    url: str | None = field(default=None, repr=False)
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        url: str | None,
        given: Mapping[str, str | int | Path | Sequence[str] | None],
        password: str | None = None,
        acl_file: str | None = None,
    ) -> UpstreamOptions:
        """Validate arguments, by the names of their options without `--`; ValueError has all mistakes."""
        arguments = [f"--{name}={each}" for name, value in given.items() for each in _values(value)]
        parser = ArgumentParser(exit_on_error=False)
        add_settings(parser, PROXY, "upstream")
        try:
            options = parser.parse_args(arguments)
            # The clients' options matter, because with upstream_auth='client' the upstream has the users.
            options.upstream, options.requirepass, options.requirepass_file = url, password, None
            options.aclfile = acl_file
            swap_of(options)
        except (ArgumentError, ValueError) as error:
            raise ValueError(OPTION.sub(_argument, str(error))) from None
        return cls(url, tuple(arguments))

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the environment of the process, with this URL in place of an inherited one."""
        others = {name: value for name, value in inherited.items() if name != UPSTREAM_VARIABLE}
        return others if self.url is None else others | {UPSTREAM_VARIABLE: self.url}


def _values(value: str | int | Path | Sequence[str] | None) -> Sequence[object]:
    """Return the values of an option, one for each time that it is given."""
    if value is None:
        return ()
    return (value,) if isinstance(value, str | int | Path) else value


def _argument(option: re.Match[str]) -> str:
    """Return the name of the argument of `sparkis.serve` for an option."""
    return ARGUMENTS.get(option[1], option[1].removeprefix("--").replace("-", "_"))
