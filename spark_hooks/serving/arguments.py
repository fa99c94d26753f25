"""The arguments of `sparkis.serve`, checked, with the settings of Spark in place of those that are not given."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from pyspark.sql import SparkSession

from resp_server.acl.rate_limits import RateLimit
from resp_server.acl.users import Users
from resp_server.commands import command_table
from resp_server.exporter.exposition import check_installed
from resp_server.net.addresses import PORT_MAX, address_of
from resp_server.net.tls import TlsFiles, server_context
from resp_server.settings.event_classes import ClassesError, classes_of, letters_of
from resp_server.settings.groups import DEFAULT_PORTS, Driver, Executors, Limits, Upstream
from resp_server.settings.option_values import http_address
from resp_server.settings.programs import TABLE
from resp_server.settings.server import ServerConfig
from resp_server.settings.setting import rows_of
from resp_server.settings.tls import Tls
from spark_hooks.serving.placement import ClientOptions
from spark_hooks.sessions import is_connect

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Group = TypeVar("Group", Tls, Limits, Executors)
PlacementName = Literal["driver", "executors"]

# The rows of keywords that are in no group.
KEYWORDS = {row.keyword: row for row in TABLE if row.keyword}
GROUPS = {"tls": Tls, "upstream": Upstream, "limits": Limits}
# How `serve` takes each group.
WRITTEN = {
    Tls: "tls=Tls({})",
    Upstream: "upstream=Upstream(URL, {})",
    Limits: "limits=Limits({})",
    Driver: "placement=Driver({})",
    Executors: "placement=Executors({})",
}
# The fields of groups, by their names and by those of their options; where both are the same, an option's field.
FIELDS = {
    name: (written, row.name)
    for attribute in ("name", "dest")
    for group, written in WRITTEN.items()
    for row in rows_of(group)
    if (name := getattr(row, attribute)) and name not in KEYWORDS | GROUPS
}


def names_groups(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate `sparkis.serve`: TypeError for a keyword that is a field of a group, with what to write instead."""

    @wraps(function)
    def call(*arguments: Parameters.args, **keywords: Parameters.kwargs) -> Result:
        for name in keywords.keys() & FIELDS.keys():
            written, field = FIELDS[name]
            raise TypeError(f"serve() has no keyword {name}: write {written.format(f'{field}=...')}")
        return function(*arguments, **keywords)

    return call


def check_groups(**given: object) -> None:
    """Raise TypeError for an argument that must be a group and is something else."""
    for name, value in given.items():
        group = GROUPS[name]
        if value is not None and not isinstance(value, group):
            fields = "URL, ownership=..." if name == "upstream" else "..."
            kind = type(value).__name__
            raise TypeError(f"{name} is a group, not a {kind}: write {name}={group.__name__}({fields})")


def option(spark: SparkSession, keyword: str, argument: object) -> str | None:
    """Return an argument's text; if it is None, that of the setting of Spark; None without one."""
    return str(argument) if argument is not None else _of_spark(spark, KEYWORDS[keyword].spark)


def filled(spark: SparkSession, group: Group) -> Group:
    """Return a group with the settings of Spark in place of the fields that are not given."""
    missing = [row for row in rows_of(type(group)) if row.spark and getattr(group, row.name) is None]
    found: dict[str, Any] = {row.name: _of_spark(spark, row.spark) for row in missing}
    return replace(group, **found)


def _of_spark(spark: SparkSession, name: str) -> str | None:
    return spark.conf.get(f"spark.sparkis.{name}", None)


def placed(spark: SparkSession, argument: PlacementName | Driver | Executors | None) -> Driver | Executors:
    """Return the place of servers, from the argument, the setting, or the master."""
    requested = argument if isinstance(argument, Driver | Executors) else option(spark, "placement", argument)
    if isinstance(requested, str) and requested not in get_args(PlacementName):
        raise ValueError(f"placement={requested!r}: give one of {', '.join(map(repr, get_args(PlacementName)))}")
    if is_connect(spark):
        if requested == "executors" or isinstance(requested, Executors):
            raise ValueError("placement='executors' needs the driver's process, and this is a Spark Connect client")
        return requested if isinstance(requested, Driver) else Driver()
    if isinstance(requested, Driver | Executors):
        return requested
    if requested is None:
        is_local = re.fullmatch(r"local(\[.*\])?", str(spark.sparkContext.master))
        return Driver() if is_local else Executors()
    return Driver() if requested == "driver" else Executors()


def refuse_ineffective(placement: PlacementName, **arguments: object) -> None:
    """Raise ValueError if an argument is given that has no effect with the placement."""
    for name, value in arguments.items():
        if value is not None:
            raise ValueError(f"{name}={value!r} has no effect with placement={placement!r}; leave it out")


def number(name: str, text: str | int | None, largest: int) -> int:
    """Return a number from 0 on; ValueError."""
    found = str(text)
    if not found.isdecimal() or int(found) > largest:
        raise ValueError(f"{name}={text}: give a number from 0 to {largest}")
    return int(found)


def client_options(
    spark: SparkSession,
    password: str | None,
    acl_file: str | Path | None,
    notify_events: str | None,
    limits: Limits,
) -> ClientOptions:
    """Check the options about clients; ValueError, or AccessError for an ACL file that is invalid on this host."""
    rates = limits.rates or ()
    texts = (rates if isinstance(rates, str) else " ".join(rates)).split()  # no user's name has spaces
    ServerConfig(rate_limits=tuple(map(RateLimit.parse, texts)))
    letters = option(spark, "notify_keyspace_events", notify_events) or ""
    try:
        letters = letters_of(classes_of(letters))
    except ClassesError as error:
        raise ValueError(f"notify_keyspace_events={letters!r}: {error}") from None
    file = option(spark, "acl_file", acl_file)
    if file is not None:
        if password is not None:
            raise ValueError(
                f"password and acl_file={file!r} are both given; leave password out, and give the user 'default' its "
                "password in the file"
            )
        Users(command_table(), path=file).load()
    return ClientOptions(file, tuple(texts), letters, tuple(_limit_arguments(limits)))


def _limit_arguments(limits: Limits) -> list[str]:
    """Return the options for the limits that differ from the defaults; ValueError."""
    arguments = []
    for row in rows_of(Limits):
        value = getattr(limits, row.name)
        if row.config is None or value == row.default:
            continue
        text = row.config.render(value)
        try:
            row.argument["type"](text)
        except ArgumentTypeError as error:
            raise ValueError(f"Limits.{row.name}: {error}") from None
        arguments.append(f"--{row.option}={text}")
    return arguments


def metrics_arguments(metrics: int | str | None) -> list[str]:
    """Return the options of a server for the argument `metrics`; ValueError, or MissingExtraError without the extra."""
    if metrics is None:
        return []
    try:
        host, port = http_address(str(metrics))
    except ArgumentTypeError as error:
        raise ValueError(f"metrics={metrics!r}: {error}") from None
    check_installed()
    return ["--metrics", address_of(host, port)]


def tls_files(tls: Tls) -> TlsFiles | None:
    """Return the files; TlsError if they cannot be used on this host."""
    cert, key, ca = (None if path is None else str(path) for path in (tls.cert_file, tls.key_file, tls.ca_cert_file))
    files = TlsFiles(cert, key, ca, tls.auth_clients)
    if files == TlsFiles():
        return None
    if files.cert is None:
        raise ValueError("TLS needs a certificate and its key: give Tls(cert_file=..., key_file=...) as well")
    server_context(files)
    return files


def ports_of(executors: Executors) -> str:
    """Return the range of ports of state servers; ValueError if it is not one."""
    chosen = executors.ports or DEFAULT_PORTS
    if not (found := re.fullmatch(r"(\d+)-(\d+)", chosen)) or not 1 <= int(found[1]) <= int(found[2]) <= PORT_MAX:
        raise ValueError(f"ports={chosen!r}: give the first and the last port of a range, like {DEFAULT_PORTS}")
    return chosen


def hosts_of(bind: str | Sequence[str]) -> list[str]:
    """Return the addresses to listen on."""
    return [bind] if isinstance(bind, str) else list(bind)


def expanded(folder: str | Path | None) -> str | None:
    """Return a folder's path, with the home of the user."""
    return None if folder is None else str(Path(folder).expanduser())
