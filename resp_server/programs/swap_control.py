"""`sparkis owners`, `confirm`, `release`, `reload`, `shadow`: the owners of keys at a proxy with an upstream."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from resp_server.backends.overlay.rules_reload import RELOAD_S_MAX
from resp_server.net.client import Client
from resp_server.net.tls import files_of
from resp_server.programs.status import DEFAULT_URL, table
from resp_server.settings.setting import add_rows, rows_of
from resp_server.settings.tls import Tls
from state_backend.model.errors import SparkisError

# A reload may first watch for copiers, so its reply takes longer than others.
REPLY_S_MAX = 2 * RELOAD_S_MAX
SEVERAL = "Each proxy has owners of its own: run this command for each of them."


class ControlCommand(NamedTuple):
    """One subcommand: a request to a proxy, and the text about its reply."""

    name: str
    description: str
    request: tuple[str, ...]
    text_of: Callable[[argparse.Namespace, Any], str]
    has_job: bool = False
    examples: str | None = None

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of the command."""
        parser.add_argument(
            "--url", default=DEFAULT_URL, help="the proxy: redis[s]://[:password@]host:port (default %(default)s)"
        )
        if self.has_job:
            parser.add_argument("job", metavar="JOB", help="the job's name")
        else:
            parser.add_argument("--json", action="store_true", help="print JSON")
        add_rows(parser, rows_of(Tls), self.name)

    def run(self, options: argparse.Namespace) -> int:
        """Send the request, and print the text; return the exit code."""
        job = (options.job,) if self.has_job else ()
        try:
            with Client.from_url(options.url, REPLY_S_MAX, files_of(options)) as client:
                client.call("HELLO", "3")
                reply = client.call(*self.request, *job)
        except SparkisError as error:
            print(f"sparkis {self.name}: {error}", file=sys.stderr)
            return 1
        is_json = not self.has_job and options.json
        print(json.dumps(reply, indent=1) if is_json else self.text_of(options, reply))
        return 0


def _owners(options: argparse.Namespace, reply: Any) -> str:
    rows = [("JOB", "STATUS", "KEYS", "EXAMPLES")]
    rows += [
        (row["job"], row["status"], ", ".join(row["key_formats"]), ", ".join(row["examples"]) or "-") for row in reply
    ]
    return table(rows)


OWNERS = ControlCommand(
    "owners",
    "List the jobs that own keys at a running proxy with an upstream, with their status: owned; waiting, because the "
    "upstream has keys of a new job; checking, until that is known; or released.",
    ("STATE", "OWNERS"),
    _owners,
)
CONFIRM = ControlCommand(
    "confirm",
    "Give the keys of a waiting or a released job to its states. The upstream's keys of the same names are no longer "
    f"read; they are not deleted. {SEVERAL}",
    ("STATE", "CONFIRM"),
    lambda options, reply: f"job {options.job}: the keys {', '.join(reply) or 'of its states'} belong to its states",
    has_job=True,
)
RELEASE = ControlCommand(
    "release",
    "Give a job's keys back to the upstream, at a running proxy. A job that still runs does not take them again until "
    f"`sparkis confirm`. {SEVERAL}",
    ("STATE", "RELEASE"),
    lambda options, reply: f"job {options.job}: the keys {', '.join(reply) or 'of its states'} belong to the upstream",
    has_job=True,
)
RELOAD = ControlCommand(
    "reload",
    "Let a running proxy read its rules file (--routes) again. A file with mistakes changes nothing, and all of its "
    f"mistakes are printed. {SEVERAL}",
    ("STATE", "RELOAD"),
    lambda options, reply: "1 rule" if reply == 1 else f"{reply} rules",
)


COUNTS = ("compared", "equal", "different", "missing_in_upstream", "missing_in_state")
BACKENDS = ("state", "upstream")
MORE_COUNTS = ("skipped", "failed")


def _shadow(options: argparse.Namespace, reply: Any) -> str:
    if not reply:
        return 'no rule has owner = "shadow"'
    lags = [f"{backend}_was_behind" for backend in BACKENDS]
    rows = [("RULE", *(name.upper().replace("_", " ") for name in (*COUNTS, *lags, *MORE_COUNTS)))]
    for row in reply:
        before, after = ([str(row[name]) for name in names] for names in (COUNTS, MORE_COUNTS))
        rows.append((row["rule"], *before, *(_lags_text(row, backend) for backend in BACKENDS), *after))
    samples = [("RULE", "OUTCOME", "COMMAND", "UPSTREAM", "STATE", "EPOCH", "AGE", "BEHIND")]
    for row in reply:
        for each in row["samples"]:
            epoch = "-" if each["epoch"] is None else str(each["epoch"])
            values = (each["outcome"].replace("_", " "), each["command"], each["upstream"], each["state"])
            samples.append((row["rule"], *values, epoch, _seconds(each["age_ms"]), _lag_text(each)))
    return table(rows) + (f"\n\n{table(samples)}" if len(samples) > 1 else "")


def _lags_text(row: Any, backend: str) -> str:
    """Return how often a backend was behind, and how far."""
    count = row[f"{backend}_was_behind"]
    if not count:
        return "0"
    average, most = (_seconds(row[f"{backend}_behind_ms{suffix}"]) for suffix in ("", "_max"))
    return f"{count} (average {average}, at most {most}, {_epochs(row[f'{backend}_behind_epochs_max'])})"


def _lag_text(sample: Any) -> str:
    if sample["behind"] is None:
        return "-"
    epochs = "" if sample["behind_epochs"] is None else f", {_epochs(sample['behind_epochs'])}"
    return f"{sample['behind']}, {_seconds(sample['behind_ms'])}{epochs}"


def _seconds(ms: int) -> str:
    return f"{ms / 1000:.1f} s"


def _epochs(count: int) -> str:
    return "1 epoch" if count == 1 else f"{count} epochs"


SHADOW = ControlCommand(
    "shadow",
    "Show what a running proxy has found for each rule with owner 'shadow': how often the replies of the upstream and "
    f"of the state were equal, and the last differences. {SEVERAL}",
    ("STATE", "SHADOW"),
    _shadow,
)
