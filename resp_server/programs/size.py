"""`sparkis size`: estimate servers, memory, disk, network and log for a load, from measured unit costs."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict

from resp_server.cluster.topology import NODES_MAX
from resp_server.programs import unit_costs
from resp_server.programs.sizing import Estimate, Load, SizeError, change_bytes, estimate, store_bytes_of_a_key
from resp_server.programs.status import table
from resp_server.settings.option_values import whole_number

DESCRIPTION = """\
Estimate what a load needs: servers, cores, memory, disk, network and the log. The estimate multiplies measured unit
costs, which it prints with their pages. No load of this size was run for it.
"""
EXAMPLES = """\
examples:
  sparkis size --keys 100M --updates 71M/min --reads 10M/s --pipeline 100
  sparkis size --keys 1M --updates 10k/s --reads 50k/s --value-bytes 200 --replicas 1
  sparkis size --keys 1M --updates 10k --reads 50k --json
"""
UNITS = {"": 1, "k": 1_000, "M": 1_000_000, "G": 1_000_000_000}
PERIODS_S = {"": 1, "/s": 1, "/min": 60, "/h": 3600}
NUMBER_MAX = 10**15
BYTES_MAX = 64 << 20


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    default = Load(keys=0, updates=0, reads=0)
    _add_options_of_keys(parser, default)
    _add_options_of_queries(parser, default)
    parser.add_argument(
        "--busy",
        type=whole_number(1, 100, "a percentage"),
        default=round(100 * default.share_used),
        metavar="PERCENT",
        help="the part of a core that may be busy (default %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: load, size, costs")


def _add_options_of_keys(parser: argparse.ArgumentParser, default: Load) -> None:
    """Add the options that describe the load: keys, reads, replicas."""
    parser.add_argument(
        "--keys", type=_number({"": 1}), required=True, metavar="N", help="keys of all states: 100M, or 1e8"
    )
    parser.add_argument(
        "--updates",
        type=_number(PERIODS_S),
        required=True,
        metavar="N[/s|/min|/h]",
        help="changed keys, per second or as said",
    )
    parser.add_argument(
        "--reads", type=_number(PERIODS_S), required=True, metavar="N[/s|/min|/h]", help="keys that clients read"
    )
    parser.add_argument(
        "--pipeline",
        type=int,
        choices=sorted(unit_costs.GET_AT_A_SERVER),
        default=default.pipeline,
        help="requests that clients send together (default %(default)s)",
    )
    parser.add_argument(
        "--key-bytes",
        type=whole_number(1, 65_536, "a number of bytes"),
        default=default.key_bytes,
        metavar="N",
        help="bytes of a whole key, job:state:key (default %(default)s)",
    )
    parser.add_argument(
        "--value-bytes",
        type=whole_number(0, BYTES_MAX, "a number of bytes"),
        default=default.value_bytes,
        metavar="N",
        help="bytes of a value (default %(default)s)",
    )
    parser.add_argument(
        "--replicas",
        type=whole_number(0, NODES_MAX - 1, "a number of replicas"),
        default=default.replicas,
        metavar="N",
        help="replicas of each slot (default %(default)s)",
    )
    parser.add_argument(
        "--retention",
        type=_minutes,
        default=default.retention_minutes,
        metavar="MINUTES",
        help="how far back the log can be read (default %(default)s)",
    )


def _add_options_of_queries(parser: argparse.ArgumentParser, default: Load) -> None:
    """Add the options of the queries that write the keys."""
    parser.add_argument(
        "--epoch",
        type=_seconds,
        default=default.epoch_s,
        metavar="SECONDS",
        help="between two micro-batches (default 1)",
    )
    parser.add_argument(
        "--partitions",
        type=whole_number(1, 100_000, "a number of tasks"),
        default=default.partitions,
        metavar="N",
        help="tasks that write an epoch, a file each (default %(default)s)",
    )
    parser.add_argument(
        "--jobs",
        type=whole_number(1, 10_000, "a number of jobs"),
        default=default.jobs,
        metavar="N",
        help="queries that share the updates (default %(default)s)",
    )
    parser.add_argument(
        "--shuffled", action="store_true", help="the states have order_by or reduce, or a query has several"
    )
    parser.add_argument(
        "--in-python",
        action="store_true",
        help="the states are not values or maps of several columns, or expire: the compiled core does not apply them",
    )


def run(options: argparse.Namespace) -> int:
    """Print the estimate; return the exit code."""
    load = _load_of(options)
    try:
        size = estimate(load)
    except SizeError as error:
        print(f"sparkis size: {error}", file=sys.stderr)
        return 1
    print(_json_of(load, size) if options.json else _text_of(load, size))
    return 0


def _load_of(options: argparse.Namespace) -> Load:
    return Load(
        keys=options.keys,
        updates=options.updates,
        reads=options.reads,
        key_bytes=options.key_bytes,
        value_bytes=options.value_bytes,
        replicas=options.replicas,
        retention_minutes=options.retention,
        pipeline=options.pipeline,
        epoch_s=options.epoch,
        partitions=options.partitions,
        jobs=options.jobs,
        share_used=options.busy / 100,
        shuffled=options.shuffled,
        in_python=options.in_python,
    )


def _json_of(load: Load, size: Estimate) -> str:
    used = [asdict(cost) for cost in unit_costs.ALL]
    return json.dumps({"load": asdict(load), "size": asdict(size), "costs": used}, indent=1, ensure_ascii=False)


def _text_of(load: Load, size: Estimate) -> str:
    each = "the server" if size.servers == 1 else f"each of {size.servers} servers"
    rows = [
        ("NEEDED", "AMOUNT", "BECAUSE"),
        ("servers", str(size.servers), _why_servers(load, size)),
        (
            f"cores, {each}",
            f"{1 + size.applying_cores:.1f}",
            f"1 for clients ({size.serving_cores:.2f} busy), {size.applying_cores:.2f} for appliers",
        ),
        (
            f"memory, {each}",
            _bytes(size.memory_bytes),
            f"all of its store in memory; at least {_bytes(size.memory_bytes_min)}, then reads wait for the disk",
        ),
        (
            f"disk, {each}",
            _bytes(size.disk_bytes),
            f"{_bytes(size.store_bytes)} of data, as much of free pages, and the copy that removes these",
        ),
        ("proxies", str(size.proxies), "for plain clients, one core each; cluster clients need none"),
        ("executors' cores", f"{size.writing_cores_all:.1f}", "to write the log, beside the job's own work"),
        (
            "log, written",
            f"{_bytes(size.log_bytes_per_s)}/s",
            f"{change_bytes(load):.0f} bytes a change; {size.log_files_per_s:.0f} files a second",
        ),
        (
            "log, read",
            f"{_bytes(size.log_read_bytes_per_s_all)}/s",
            f"every server reads all changes; {size.log_reads_per_s_all:.0f} files a second",
        ),
        ("log, stored", _bytes(size.log_bytes_max), f"at most, with a retention of {load.retention_minutes:g} minutes"),
        (
            "clients' network",
            f"{_bytes(size.client_bytes_out_per_s_all)}/s",
            f"replies; {_bytes(size.client_bytes_in_per_s_all)}/s of requests, without TCP's own bytes",
        ),
    ]
    parts = [table(rows), "\n".join(_assumptions(load)), _sources()]
    parts += ["\n".join(f"warning: {text}" for text in size.warnings)] if size.warnings else []
    return "\n\n".join(parts)


def _why_servers(load: Load, size: Estimate) -> str:
    shards = f"{size.shards} with a part of the keys each" if size.shards > 1 else "1 has all keys"
    copies = f", and {load.replicas} replica{'s' if load.replicas > 1 else ''} of each" if load.replicas else ""
    return shards + copies


def _assumptions(load: Load) -> list[str]:
    applied = "by Python" if load.in_python else "by the compiled core"
    kept = f"{store_bytes_of_a_key(load):.0f} bytes each in a store"
    shared = (
        f"{load.jobs} job{'s' if load.jobs > 1 else ''}, an epoch of {load.partitions} files each {load.epoch_s:g} s"
    )
    return [
        "assumptions:",
        f"  {load.keys:,.0f} keys of {load.key_bytes} bytes with values of {load.value_bytes}: {kept}",
        f"  {load.updates:,.0f} updates and {load.reads:,.0f} reads a second, spread evenly over the keys",
        f"  {shared}, applied {applied}",
        f"  reads are GETs in pipelines of {load.pipeline}, at masters; {load.share_used:.0%} of a core may be busy",
        "  a snapshot has as many bytes a key as the changes",
    ]


def _sources() -> str:
    return "\n".join(["unit costs:", *(f"  {_amount(cost)}: {cost.meaning} ({cost.page})" for cost in unit_costs.ALL)])


def _amount(cost: unit_costs.Cost) -> str:
    return _bytes(cost.value) if cost.unit == "bytes" else f"{cost.value:g} {cost.unit}".rstrip()


def _bytes(number: float) -> str:
    for unit in ("bytes", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.3g} {unit}"
        number /= 1000
    return f"{number:.3g} TB" if number < 1000 else f"{number:,.0f} TB"


def _number(periods_s: dict[str, int]) -> Callable[[str], float]:
    """Return the parser of a number (1e7), with a unit (10k, 71M) and, for a rate, a period."""
    form = re.compile(rf"(\d+(?:\.\d+)?(?:[eE]\+?\d{{1,2}})?)([kMG]?)({'|'.join(map(re.escape, periods_s))})")

    def read(text: str) -> float:
        found = form.fullmatch(text)
        number = float(found[1]) * UNITS[found[2]] / periods_s[found[3]] if found else NUMBER_MAX + 1
        if number > NUMBER_MAX:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a number such as 500, 10k, 71M, 1e7{' or 71M/min' if len(periods_s) > 1 else ''}"
            )
        return number

    return read


def _positive(what: str, largest: float, *, zero: bool) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = -1.0
        if not (0 <= number <= largest) or (number == 0 and not zero):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} up to {largest:g}")
        return number

    return read


_minutes = _positive("a number of minutes", 10_000_000, zero=True)
_seconds = _positive("a number of seconds", 86_400, zero=False)
