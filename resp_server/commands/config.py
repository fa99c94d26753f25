"""CONFIG: settings by Redis' names, and those of them that may change while the server runs.

A modifiable setting is a row of `settings.server`, so it is a field of `ServerConfig`. CONFIG SET replaces the
`ServerConfig` of every process (`ServerContext.configure`); code reads it from `ServerContext.config` each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from resp_server.command.handler import OneOrMore, command, worker_query
from resp_server.net.listeners import ACCEPTS_PER_ROUND
from resp_server.pipeline.context import CommandContext, ServerContext, ok
from resp_server.protocol.errors import GenericError, client_text, syntax_error
from resp_server.protocol.glob import matcher
from resp_server.protocol.replies import OK, Reply, Sliced
from resp_server.settings.config_values import SettingError
from resp_server.settings.server import ROWS, ServerConfig
from resp_server.settings.setting import InConfig, Setting, text_of

WILDCARDS = frozenset(b"*?[")


class Readable(NamedTuple):
    """How CONFIG has a setting. row: None: sparkis cannot change it, and CONFIG SET accepts only its present value.

    is_immutable: CONFIG SET refuses any value, as in Redis.
    """

    render: Callable[[ServerContext], str]
    row: Setting | None = None
    is_immutable: bool = False
    parse: Callable[[bytes], Any] | None = None


def constant(value: str) -> Readable:
    """Return a setting of Redis that has only one possible value here."""
    return Readable(lambda server: value)


def immutable(render: Callable[[ServerContext], str]) -> Readable:
    """Return a setting that is fixed when the server starts."""
    return Readable(render, is_immutable=True)


def of_row(row: Setting, config: InConfig) -> Readable:
    """Return the setting of a row, which is a field of ServerConfig."""
    return Readable(
        lambda server: config.render(getattr(server.config, row.name)), row, not row.is_modifiable, config.parse
    )


def _port(server: ServerContext) -> str:
    return str(server.process.port if server.process.port != server.process.tls_port else 0)


# What Redis has and sparkis cannot change.
FIXED = {
    "acl-pubsub-default": constant("resetchannels"),
    "appendonly": constant("no"),
    "cluster-enabled": immutable(lambda server: "no" if server.cluster is None else "yes"),
    "daemonize": immutable(lambda server: "no"),
    "hide-user-data-from-log": constant("no"),
    "io-threads": immutable(lambda server: "1"),
    "latency-tracking": constant("yes"),
    "latency-tracking-info-percentiles": constant("50 99 99.9"),
    "locale-collate": constant("C"),  # SORT_RO ALPHA compares bytes
    "max-new-connections-per-cycle": constant(str(ACCEPTS_PER_ROUND)),
    "max-new-tls-connections-per-cycle": constant(str(ACCEPTS_PER_ROUND)),
    "maxmemory": constant("0"),
    "maxmemory-policy": constant("noeviction"),
    "port": Readable(_port),
    "replica-read-only": constant("yes"),
    "replica-serve-stale-data": constant("yes"),
    "save": constant(""),
    "slave-read-only": constant("yes"),
    "slave-serve-stale-data": constant("yes"),
    "tls-port": Readable(lambda server: str(server.process.tls_port)),
}
OF_ROWS = {row.option: of_row(row, row.config) for row in ROWS.values() if row.config is not None}
SETTINGS = dict(sorted((FIXED | OF_ROWS).items()))
TLS_FIELDS = {"tls-cert-file": "cert", "tls-key-file": "key", "tls-ca-cert-file": "ca"}


def tls_file(field: str) -> Readable:
    """Return the setting of a TLS file; the server reloads a changed file by itself."""
    return immutable(lambda server: text_of(getattr(server.config.tls, field)))


def settings_of(server: ServerContext) -> Mapping[str, Readable]:
    """Return the settings of a server; some exist only with TLS or in a cluster."""
    if server.config.tls is None and server.cluster is None:
        return SETTINGS
    return _settings(server.config.tls is not None, server.cluster is not None)


@cache
def _settings(has_tls: bool, is_node: bool) -> Mapping[str, Readable]:
    settings = dict(SETTINGS)
    if has_tls:
        settings |= {name: tls_file(field) for name, field in TLS_FIELDS.items()}
    if is_node:
        # A node serves its slots while other slots have no owner.
        settings["cluster-require-full-coverage"] = constant("no")
    return settings


# Patterns of CONFIG GET that are matched at once; more are matched in steps (guess: some 50 us each).
PATTERNS_AT_ONCE = 16


@command("config|get")
def config_get(context: CommandContext, *patterns: OneOrMore) -> Reply:
    """Returns the effective values of configuration parameters."""
    settings = settings_of(context.server)
    if len(patterns) == 1 and (found := settings.get(patterns[0].decode("latin-1"))) is not None:
        return {patterns[0]: found.render(context.server).encode()}
    if len(patterns) <= PATTERNS_AT_ONCE:
        arguments = [argument for chunk in _matching_settings(context.server, settings, patterns) for argument in chunk]
        return dict(zip(arguments[::2], arguments[1::2], strict=True))
    return Sliced(_matching_settings(context.server, settings, patterns), lambda: None, dict)


def _matching_settings(
    server: ServerContext, settings: Mapping[str, Readable], patterns: Sequence[bytes]
) -> Iterator[Sequence[bytes]]:
    """Match patterns in steps; the last chunk has the matched settings, name and value in turn."""
    # The name of each matched setting, and the name to reply with: the client's own spelling if it typed a name.
    matched: dict[str, bytes] = {}
    for pattern in patterns:
        yield []
        # In Redis a zero byte ends a pattern, but not a name.
        glob = pattern.partition(b"\0")[0]
        if not WILDCARDS.intersection(glob):
            name = pattern.decode("utf-8", "replace").lower()
            if name in settings:
                matched.setdefault(name, pattern)
            continue
        matches = matcher(glob, ignore_case=True)
        for name in settings:
            if matches(name.encode()):
                matched.setdefault(name, name.encode())
    yield [argument for name, typed in matched.items() for argument in (typed, settings[name].render(server).encode())]


@command("config|set")
def config_set(context: CommandContext, name: bytes, value: bytes, *more: bytes) -> Reply:
    """Sets configuration parameters in-flight."""
    if len(more) % 2:
        raise syntax_error()
    server = context.server
    pairs = ((name, value), *zip(more[::2], more[1::2], strict=True)) if more else ((name, value),)
    changes = _changes(server, pairs)
    if server.workers is None and _has_values(server.config, changes):
        return OK
    changed = sorted({*server.config.changed_fields, *changes})
    return server.gather(configure, {**changes, "changed_fields": changed}, ok)


def _has_values(config: ServerConfig, changes: Mapping[str, Any]) -> bool:
    """Return whether CONFIG SET has set these values before. A password also resets the default user."""
    for name, value in changes.items():
        if getattr(config, name) != value or name not in config.changed_fields or name == "password":
            return False
    return True


def _changes(server: ServerContext, pairs: Sequence[tuple[bytes, bytes]]) -> Mapping[str, Any]:
    """Return the new values of ServerConfig's fields; GenericError for the first invalid pair, and nothing changes."""
    settings, config = settings_of(server), server.config
    found: dict[str, tuple[Readable, bytes]] = {}
    for as_typed, value in pairs:
        name = str(as_typed, "utf-8", "replace").lower()
        setting = settings.get(name)
        if setting is None:
            raise GenericError(f"Unknown option or number of arguments for CONFIG SET - '{client_text(as_typed)}'")
        if setting.is_immutable:
            raise _failed(client_text(as_typed), "can't set immutable config")
        if name in found:
            raise _failed(client_text(as_typed), "duplicate parameter")
        found[name] = setting, value
    changes: dict[str, Any] = {}
    for name, ((render, row, _, parse), value) in found.items():
        if row is not None and parse is not None:
            try:
                parsed = parse(value)
            except SettingError as error:
                raise _failed(name, str(error)) from None
            changes[row.name] = row.joined(getattr(config, row.name), parsed) if type(parsed) is dict else parsed
        elif value.decode("utf-8", "replace") != render(server):
            raise _failed(name, "can't set immutable config")
    return changes


def _failed(name: str, reason: str) -> GenericError:
    return GenericError(f"CONFIG SET failed (possibly related to argument '{name}') - {reason}")


@worker_query("configure")
def configure(server: ServerContext, changes: Mapping[str, Any]) -> None:
    """Change settings of this process, unless they have these values. A password also resets the default user."""
    if "password" in changes or any(getattr(server.config, name) != value for name, value in changes.items()):
        server.configure(changes)


@command("config|resetstat")
def config_resetstat(context: CommandContext) -> Reply:
    """Resets the server's statistics."""
    return context.server.gather(reset_statistics, None, ok)


@worker_query("reset statistics")
def reset_statistics(server: ServerContext, nothing: None) -> None:
    """Reset the statistics of this process."""
    server.reset_statistics()


@command("config|rewrite")
def config_rewrite(context: CommandContext) -> Reply:
    """Persists the effective configuration to file."""
    server = context.server
    if server.config.config_file is None:
        raise GenericError("The server is running without a config file")
    # Imported here, because it takes 20 ms, and few servers rewrite a file.
    from resp_server.commands.config_rewrite import rewrite

    values = {
        name: (row.config.in_file or row.config.render)(getattr(server.config, row.name))
        for name, row in ((name, each.row) for name, each in SETTINGS.items())
        if row is not None and row.config is not None and row.name in server.config.changed_fields
    }
    rewrite(server.config.config_file, server.config.config_table, values)
    return OK


@command("config|help")
def config_help(context: CommandContext) -> Reply:
    """Returns helpful text about the different subcommands."""
    return context.server.table.help("config")
