"""`sparkis swap-check --delete-copies`: deletes an upstream's old copies of keys that states own.

Just before keys are deleted, each proxy returns their owners. A key is deleted only if a state owns it at all proxies,
and none of them passes writes of it to the upstream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack

import hiredis

from resp_server.backends.routing.key_analysis import printable
from resp_server.backends.routing.key_patterns_found import FoundKey
from resp_server.backends.routing.stale_copies import Copies, ReportedOwner
from resp_server.net.client import Client, ClientError
from resp_server.net.tls import files_of
from resp_server.programs.status import table
from resp_server.programs.upstream_calls import UpstreamCalls, UpstreamError
from resp_server.programs.upstream_options import upstream_of
from state_backend.model.clock import MS_PER_S
from state_backend.progress_bar import ProgressBar

# Keys of one STATE OWNER, and of one batch of deletions: a proxy takes no more.
KEYS_AT_ONCE = 128
RUN_ID = re.compile(r"^run_id:(\w+)", re.MULTILINE)


class NoConsentError(UpstreamError):
    """The user has not agreed to the deletion."""


def add_copies_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the deletion to the command."""
    group = parser.add_argument_group("after the swap")
    group.add_argument(
        "--delete-copies",
        action="store_true",
        help="delete the upstream's old copies of keys that states own, instead of an analysis; asks before",
    )
    group.add_argument(
        "--proxy",
        action="append",
        default=[],
        metavar="URL",
        help="with --delete-copies: a proxy with this upstream, which has the owners of keys; repeat it for each proxy",
    )
    group.add_argument("--yes", action="store_true", help="with --delete-copies: do not ask")


async def delete_copies(options: argparse.Namespace) -> None:
    """Ask the user, delete the copies, and print their number; SparkisError if the owner of a key is not clear."""
    async with UpstreamCalls(upstream_of(options), options.upstream_timeout / MS_PER_S) as upstream:
        with ExitStack() as stack:
            proxies = [stack.enter_context(Client.from_url(url, tls=files_of(options))) for url in options.proxy]
            await _check_proxies(proxies, upstream)
            copies = await _CopyScan(upstream, proxies).run("keys looked at")
            if not options.json:
                print(_as_text(upstream.address, copies))
            deleted = 0
            if copies.deletable:
                _ask(options, sum(copies.deletable.values()))
                deletion = _CopyScan(upstream, proxies, deletes=True)
                try:
                    await deletion.run("keys looked at again")
                except asyncio.CancelledError:  # by Ctrl-C
                    told = f"{deletion.deleted:,} copies are deleted, run the command again for the others"
                    print(f"sparkis swap-check: interrupted; {told}", file=sys.stderr)
                    raise
                deleted = deletion.deleted
            if options.json:
                print(json.dumps(_as_json(upstream.address, copies, deleted), indent=1))
            elif copies.deletable:
                print(f"{deleted:,} copies deleted.")


async def _check_proxies(proxies: Sequence[Client], upstream: UpstreamCalls) -> None:
    """Check that each proxy has this upstream, and select the database; SparkisError."""
    ids = {_run_id(await upstream.call(node, b"INFO", b"server")) for node in range(upstream.node_count)}
    for proxy in proxies:
        fields = str(proxy.call("INFO", "proxy"))
        found = re.search(r"^upstream_database:(\d+)", fields, re.MULTILINE)
        if found is None:
            raise ClientError(f"{proxy.address} is no proxy with an upstream")
        run_id = _run_id(proxy.call("INFO", "server"))
        if not run_id or run_id not in ids:
            raise ClientError(f"{proxy.address} has another upstream than {upstream.address}: nothing is deleted")
        database, default = upstream.database, int(found[1])
        if not database and default:
            raise ClientError(f"clients of {proxy.address} see database {default}: name it in the URL of the upstream")
        proxy.call("SELECT", str(database))


def _run_id(info: bytes | str) -> str:
    text = info if isinstance(info, str) else info.decode("utf-8", "replace")
    found = RUN_ID.search(text.replace("\r", ""))
    return found[1] if found else ""


class _CopyScan:
    """A scan of all keys.

    Args:
        deletes: It deletes the copies.
    """

    def __init__(self, upstream: UpstreamCalls, proxies: Sequence[Client], *, deletes: bool = False) -> None:
        self._upstream, self._proxies, self._deletes = upstream, proxies, deletes
        self.copies = Copies()
        self.deleted = 0

    async def run(self, noun: str) -> Copies:
        """Scan all keys; SparkisError. A key that exists during the whole scan is found at least once."""
        count, total = 0, await self._upstream.key_count()
        with ProgressBar(noun) as progress:
            for node in range(self._upstream.node_count):
                async for batch in self._upstream.scan(node):
                    for first in range(0, len(batch), KEYS_AT_ONCE):
                        await self._take(batch[first : first + KEYS_AT_ONCE])
                    count += len(batch)
                    progress.show(count, total)
        return self.copies

    async def _take(self, keys: Sequence[FoundKey]) -> None:
        names = [key.name for key in keys]
        rows = [[ReportedOwner(*row) for row in proxy.call("STATE", "OWNER", *names)] for proxy in self._proxies]
        copied = [key for key, owners in zip(keys, zip(*rows, strict=True), strict=True) if self._add(key, owners)]
        if self._deletes and copied:
            await self._delete(copied)

    def _add(self, key: FoundKey, owners: Sequence[ReportedOwner]) -> bool:
        return self.copies.add(key.name, owners)

    async def _delete(self, keys: Sequence[FoundKey]) -> None:
        # A request for each key: a cluster's node takes keys of one slot only.
        replies = await self._upstream.call_all([(key.node, (b"UNLINK", key.name)) for key in keys])
        self.deleted += sum(reply for reply in replies if isinstance(reply, int))
        failed = next((reply for reply in replies if isinstance(reply, Exception)), None)
        if failed is not None:
            named = f"the upstream {self._upstream.address}: " if isinstance(failed, hiredis.ReplyError) else ""
            raise UpstreamError(f"{named}{failed}; {self.deleted:,} copies are deleted, run the command again")


def _ask(options: argparse.Namespace, count: int) -> None:
    """Ask whether to delete this many keys; NoConsentError if the answer is not yes."""
    if options.yes:
        return
    if not sys.stdin.isatty():
        raise NoConsentError(f"nothing is deleted: to delete {count:,} copies, give --yes, or run it at a terminal")
    print(f"Delete these {count:,} copies? [y/N] ", end="", file=sys.stderr, flush=True)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NoConsentError("nothing is deleted")


def _as_text(address: str, copies: Copies) -> str:
    parts = []
    if copies.deletable:
        rows = [
            (state, f"{count:,}", ", ".join(map(printable, copies.examples[state])))
            for state, count in sorted(copies.deletable.items())
        ]
        parts.append(
            f"{address} has old copies of keys that states own:\n{table([('STATE', 'COPIES', 'EXAMPLES'), *rows])}"
        )
    else:
        parts.append(f"{address} has no old copies of keys that states own.")
    for state, count in sorted(copies.written.items()):
        parts.append(f'{count:,} copies of {state} are left: a rule with writes = "pass" lets a program write them.')
    return "\n".join(parts)


def _as_json(address: str, copies: Copies, deleted: int) -> dict[str, object]:
    return {
        "upstream": address,
        "copies": dict(copies.deletable),
        "written": dict(copies.written),
        "deleted": deleted,
    }
