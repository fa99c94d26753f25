"""What `make test-clients` runs: each client's program at all of its places, and their comparison."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from compat.client_programs import page
from compat.client_programs.clients import BuildError, Client, build, clients, install
from compat.client_programs.places import PLACES, SERVER, Places, running_places
from compat.client_programs.results import LIMITS, At, Result, known_results
from compat.client_programs.runs import run
from compat.conformance.page import put_into
from compat.processes import end_in_order
from compat.swap_programs.outcomes import Limit, limits

PRINTED_CHARS_MAX = 600


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen programs; 1 if one cannot be built, or if a result differs that may not."""
    options = _options(arguments)
    end_in_order()
    chosen = [each for each in clients() if each.name in (options.client or [each.name])]
    chosen = [each for each in chosen if each.is_quick or not options.quick]
    built = [each for each in chosen if _is_built(each)]
    is_good = len(built) == len([each for each in chosen if not each.missing])
    intended = limits(LIMITS)
    results = []
    with running_places() as places:
        for client in built:
            result = Result(client.name, list(_runs(client, options.place or PLACES, places)))
            is_good &= _print_result(result, intended, is_whole=not options.place)
            results.append((client, result))
    if not options.quick:
        _write_pages(results, intended, options)
    return 0 if is_good else 1


def _write_pages(
    results: Sequence[tuple[Client, Result]], intended: Sequence[Limit], options: argparse.Namespace
) -> None:
    """Write the tables of the given pages whose places were run; rows of clients that were not run stay."""
    is_whole = len(results) == len(list(clients()))
    if options.page is not None and not options.place:
        former = "" if is_whole else options.page.read_text(encoding="utf-8")
        put_into(options.page, page.tables(results, intended, former), page.MARKS)
    if options.refusals is not None and SERVER in (options.place or PLACES):
        former = "" if is_whole else options.refusals.read_text(encoding="utf-8")
        put_into(options.refusals, page.refusals(results, former), page.REFUSALS_MARKS)


def _is_built(client: Client) -> bool:
    """Build a client's program, and print why if that is not possible."""
    try:
        install(client)
        if client.missing:
            print(f"{client.name}: skipped, as there is no {', '.join(client.missing)} on the PATH", flush=True)
            return False
        build(client.folder, client.part)
    except BuildError as error:
        print(f"{client.name}: {error}", flush=True)
        return False
    return True


def _runs(client: Client, chosen: Sequence[str], places: Places) -> Iterator[At]:
    """Run a client's program at its places."""
    known = known_results()
    for place in PLACES:
        if place in client.places and place in chosen:
            with places.pair(place) as (name, real, ours):
                expected = run(client.words, real)
                for each in ours:
                    yield At.of(client.name, name, each.name, (expected, run(client.words, each)), known)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m compat.client_programs", description=__doc__)
    names = [each.name for each in clients()]
    parser.add_argument("--client", action="append", choices=names, help="this client alone; may be repeated")
    only = "this place alone; may be repeated; --page is not written then, --refusals only with the place `server`"
    parser.add_argument("--place", action="append", choices=PLACES, help=only)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="one client a language, of those that are built fast; the pages stay as they are",
    )
    parser.add_argument("--page", metavar="FILE", type=Path, help="write the tables between the marks of this file")
    parser.add_argument(
        "--refusals", metavar="FILE", type=Path, help="write the table of refused writes between its marks of this file"
    )
    return parser.parse_args(arguments)


def _print_result(result: Result, intended: Sequence[Limit], *, is_whole: bool) -> bool:
    """Print what a client's program found; return whether all differences are intended."""
    is_good = True
    for at in result.runs:
        unexplained = at.unexplained(result.client, intended)
        print(f"{result.client}, {at.place}, {at.name}: {at.same} of {len(at.expected)} steps are the same", flush=True)
        for step in unexplained:
            is_good = False
            print(f"  ✗ {step}\n      real:    {_shortened(at.expected.get(step))}")
            print(f"      sparkis: {_shortened(at.found.get(step))}", flush=True)
        if at.proves_nothing:
            is_good = False
            print(f"  ✗ the program fails at {at.name}'s real server, or has one result in all steps", flush=True)
    for glob in result.unneeded(intended) if is_whole else ():
        is_good = False
        print(f"  ✗ {glob} of limits.toml covers no difference any more: remove it")
    return is_good


def _shortened(outcome: object) -> str:
    text = repr(outcome)
    return text if len(text) <= PRINTED_CHARS_MAX else text[:PRINTED_CHARS_MAX] + "..."


if __name__ == "__main__":
    sys.exit(main())
