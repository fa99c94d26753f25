"""CONFIG: settings by Redis' names, and those of them that may change while the server runs.

A modifiable setting is a field of `ServerConfig`. CONFIG SET replaces the `ServerConfig` of every process
(`ServerContext.configure`); code reads it from `ServerContext.config` each time.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resp_server.command.handler import OneOrMore, command, integer, worker_query
from resp_server.execution.context import CommandContext, ServerContext
from resp_server.net.listeners import ACCEPTS_PER_ROUND
from resp_server.protocol.errors import PlainError, ReplyError, client_text, syntax_error
from resp_server.protocol.glob import matcher
from resp_server.protocol.replies import OK, Reply, Sliced
from resp_server.push.keyspace_notifications import ClassesError, classes_of, config_letters, letters_of
from state_backend import log_lines

WILDCARDS = frozenset(b"*?[")
INT32_MAX = 2**31 - 1
CLIENTS_MAX = 2**32 - 1
MIB = 1 << 20
# Upper bounds of what CONFIG SET accepts for a client's output buffer, query buffer and one bulk string.
OUTPUT_BYTES_MAX = QUERY_BUFFER_BYTES_MAX = 1 << 30
BULK_BYTES_MAX = 512 << 20
UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1 << 10, "m": 10**6, "mb": 1 << 20, "g": 10**9, "gb": 1 << 30}

Render = Callable[[ServerContext], str]
Parse = Callable[[bytes], Any]


class SettingError(ValueError):
    """An invalid value of a setting; the text is Redis'."""


@dataclass(frozen=True)
class Setting:
    """One setting: how CONFIG GET renders it, and how CONFIG SET parses it into a field of ServerConfig, or several.

    A setting without a field cannot change. is_modifiable: Redis can change it, so CONFIG SET accepts its present
    value; any value of an immutable setting is refused. in_file: makes what CONFIG REWRITE writes, if the option has
    other values than the setting.
    """

    render: Render
    field: str = ""
    parse: Parse = bytes.decode
    is_modifiable: bool = False
    in_file: Render | None = None

    @property
    def fields(self) -> Collection[str]:
        """All fields of ServerConfig that the setting changes."""
        return OUTPUT_FIELDS if self.parse is output_limits else {self.field}


def immutable(field: str) -> Setting:
    """Declare a setting that is fixed when the server starts."""
    return Setting(lambda server: _text(getattr(server.config, field)))


def constant(value: str) -> Setting:
    """Declare a setting of Redis that has only one possible value here."""
    return Setting(lambda server: value, is_modifiable=True)


def modifiable(field: str, parse: Parse, render: Callable[[Any], str] | None = None) -> Setting:
    """Declare a setting that may change while the server runs. render: makes its text; None: the plain value."""
    return Setting(lambda server: (render or _text)(getattr(server.config, field)), field, parse, True)


def integer_between(minimum: int, maximum: int) -> Parse:
    """Return a parser of integers."""

    def parse(word: bytes) -> int:
        try:
            value = integer(word)
        except ReplyError:
            raise SettingError("argument couldn't be parsed into an integer") from None
        return _checked(value, minimum, maximum)

    return parse


def memory_size(minimum: int, maximum: int) -> Parse:
    """Return a parser of sizes in bytes, such as `64mb`."""

    def parse(word: bytes) -> int:
        text = word.decode("latin-1").lower()
        digits = text.rstrip("bkmg")
        unit = UNITS.get(text[len(digits) :])
        if unit is None or not digits.isdecimal() or not digits.isascii():
            raise SettingError("argument must be a memory value")
        return _checked(int(digits) * unit, minimum, maximum)

    return parse


def yes_or_no(word: bytes) -> bool:
    """Parse `yes` or `no`."""
    if word.lower() not in (b"yes", b"no"):
        raise SettingError("argument must be 'yes' or 'no'")
    return word.lower() == b"yes"


def _checked(value: int, minimum: int, maximum: int) -> int:
    if not minimum <= value <= maximum:
        raise SettingError(f"argument must be between {minimum} and {maximum} inclusive")
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(value) if isinstance(value, tuple) else "" if value is None else str(value)


def _port(server: ServerContext) -> str:
    return str(server.process.port if server.process.port != server.process.tls_port else 0)


# The fields of each client class: hard limit, soft limit, soft seconds.
OUTPUT_LIMITS = {
    "normal": ("output_bytes_max", "output_soft_bytes", "output_soft_seconds"),
    "pubsub": ("subscriber_output_bytes_max", "subscriber_output_soft_bytes", "subscriber_output_soft_seconds"),
}

OUTPUT_FIELDS = {field for fields in OUTPUT_LIMITS.values() for field in fields}


def _output_limits(server: ServerContext) -> str:
    return " ".join(
        f"{name} {' '.join(str(getattr(server.config, field)) for field in fields)}"
        for name, fields in OUTPUT_LIMITS.items()
    )


def output_limits(word: bytes) -> Mapping[str, int]:
    """Parse `normal 1gb 0 0 pubsub 32mb 8mb 60`, or one of the two classes; a hard limit of 0 is refused."""
    words = word.decode("latin-1").split()
    if not words or len(words) % 4:
        raise SettingError("Wrong number of arguments in buffer limit configuration.")
    fields: dict[str, int] = {}
    for name, hard, soft, seconds in zip(*[iter(words)] * 4, strict=True):
        if name.lower() not in OUTPUT_LIMITS:
            raise SettingError("Invalid client class specified in buffer limit configuration.")
        try:
            sizes = (memory_size(1, OUTPUT_BYTES_MAX)(hard.encode()), memory_size(0, OUTPUT_BYTES_MAX)(soft.encode()))
            limits = (*sizes, integer_between(0, INT32_MAX)(seconds.encode()))
        except SettingError:
            text = "Error in hard, soft or soft_seconds setting in buffer limit configuration."
            raise SettingError(f"{text} A hard limit is 1 to {OUTPUT_BYTES_MAX}") from None
        fields |= zip(OUTPUT_LIMITS[name.lower()], limits, strict=True)
    return fields


def event_classes(word: bytes) -> str:
    """Parse the classes of keyspace events; return their letters."""
    try:
        return letters_of(classes_of(word.decode("latin-1")))
    except ClassesError as error:
        raise SettingError(str(error)) from None


# Redis' levels, and those that log the same here.
LEVELS = {"debug": "debug", "verbose": "info", "notice": "info", "warning": "warning", "nothing": "nothing"}
SHOWN_LEVELS = {"info": "notice", "error": "warning"}


def log_levels(word: bytes) -> str:
    """Parse a level of Redis or of `--loglevel`, and the levels of some parts: `notice,sparkis.tls=debug`."""
    found = []
    for each in word.decode("utf-8", "replace").lower().split(","):
        part, is_given, level = each.rpartition("=")
        if level not in LEVELS and level not in log_lines.LEVELS:
            raise SettingError(f"argument(s) must be one of the following: {', '.join(LEVELS)}")
        if is_given and part not in log_lines.PARTS:
            known = ", ".join(log_lines.PARTS)
            raise SettingError(f"{client_text(part.encode())} is no part of sparkis; give one of {known}")
        found.append(f"{part}{is_given}{LEVELS.get(level, level)}")
    return ",".join(found)


def shown_levels(levels: str) -> str:
    """Return levels by Redis' names."""
    parts = (each.rpartition("=") for each in levels.lower().split(","))
    return ",".join(f"{part}{equals}{SHOWN_LEVELS.get(level, level)}" for part, equals, level in parts)


SETTINGS: dict[str, Setting] = {
    "aclfile": immutable("acl_file"),
    "acl-pubsub-default": constant("resetchannels"),
    "acllog-max-len": modifiable("acl_log_entries_max", integer_between(0, 2**63 - 1)),
    "appendonly": constant("no"),
    "bind": immutable("hosts"),
    "client-query-buffer-limit": modifiable("query_buffer_bytes_max", memory_size(MIB, QUERY_BUFFER_BYTES_MAX)),
    "client-output-buffer-limit": Setting(_output_limits, "output_bytes_max", output_limits, is_modifiable=True),
    "cluster-enabled": Setting(lambda server: "no" if server.cluster is None else "yes"),
    "daemonize": Setting(lambda server: "no"),
    "databases": immutable("databases"),
    "hide-user-data-from-log": constant("no"),
    "io-threads": Setting(lambda server: "1"),
    "latency-monitor-threshold": modifiable("latency_over_ms", integer_between(0, 2**63 - 1)),
    "latency-tracking": constant("yes"),
    "latency-tracking-info-percentiles": constant("50 99 99.9"),
    "loglevel": Setting(
        lambda server: shown_levels(server.config.log_levels),
        "log_levels",
        log_levels,
        is_modifiable=True,
        in_file=lambda server: server.config.log_levels,
    ),
    "locale-collate": constant("C"),  # SORT_RO ALPHA compares bytes
    "max-new-connections-per-cycle": constant(str(ACCEPTS_PER_ROUND)),
    "max-new-tls-connections-per-cycle": constant(str(ACCEPTS_PER_ROUND)),
    "maxclients": modifiable("clients_max", integer_between(1, CLIENTS_MAX)),
    "maxmemory": constant("0"),
    "maxmemory-policy": constant("noeviction"),
    "notify-keyspace-events": modifiable("notify_events", event_classes, config_letters),
    "port": Setting(_port, is_modifiable=True),
    "protected-mode": modifiable("protected_mode", yes_or_no),
    "proto-max-bulk-len": modifiable("bulk_bytes_max", memory_size(MIB, BULK_BYTES_MAX)),
    "replica-read-only": constant("yes"),
    "replica-serve-stale-data": constant("yes"),
    "requirepass": modifiable("password", lambda word: word.decode("utf-8", "surrogateescape") or None),
    "save": constant(""),
    "slave-read-only": constant("yes"),
    "slave-serve-stale-data": constant("yes"),
    "slowlog-log-slower-than": modifiable("slow_over_us", integer_between(-1, 2**63 - 1)),
    "slowlog-max-len": modifiable("slow_entries_max", integer_between(0, 2**63 - 1)),
    "tcp-backlog": immutable("backlog_connections"),
    "tcp-keepalive": modifiable("tcp_keepalive_seconds", integer_between(0, INT32_MAX)),
    "tracking-table-max-keys": modifiable("tracked_keys_max", integer_between(0, 2**63 - 1)),
    "tls-port": Setting(lambda server: str(server.process.tls_port), is_modifiable=True),
    "timeout": modifiable("idle_timeout_seconds", integer_between(0, INT32_MAX)),
}


def changes_of(name: str, value: bytes) -> Mapping[str, Any]:
    """Return the fields of ServerConfig that a modifiable setting changes, with their new values; SettingError."""
    setting = SETTINGS[name]
    parsed = setting.parse(value)
    return parsed if isinstance(parsed, dict) else {setting.field: parsed}


TLS_FIELDS = {"tls-cert-file": "cert", "tls-key-file": "key", "tls-ca-cert-file": "ca"}


def tls_file(field: str) -> Setting:
    """Declare a TLS file; the server reloads a changed file by itself."""
    return Setting(lambda server: _text(getattr(server.config.tls, field)))


def settings_of(server: ServerContext) -> Mapping[str, Setting]:
    """Return the settings of a server; some exist only with TLS or in a cluster."""
    settings = dict(SETTINGS)
    if server.config.tls is not None:
        settings |= {name: tls_file(field) for name, field in TLS_FIELDS.items()}
    if server.cluster is not None:
        # A node serves its slots while other slots have no owner.
        settings["cluster-require-full-coverage"] = constant("no")
    return settings


# Patterns of CONFIG GET that are matched at once; more are matched in steps (guess: some 50 us each).
PATTERNS_AT_ONCE = 16


@command("config|get")
def config_get(context: CommandContext, *patterns: OneOrMore) -> Reply:
    """Returns the effective values of configuration parameters."""
    settings = settings_of(context.server)
    if len(patterns) <= PATTERNS_AT_ONCE:
        words = [word for chunk in _matching_settings(context.server, settings, patterns) for word in chunk]
        return dict(zip(words[::2], words[1::2], strict=True))
    return Sliced(_matching_settings(context.server, settings, patterns), lambda: None, dict)


def _matching_settings(
    server: ServerContext, settings: Mapping[str, Setting], patterns: Sequence[bytes]
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
    yield [word for name, typed in matched.items() for word in (typed, settings[name].render(server).encode())]


@command("config|set")
def config_set(context: CommandContext, name: bytes, value: bytes, *more: bytes) -> Reply:
    """Sets configuration parameters in-flight."""
    if len(more) % 2:
        raise syntax_error()
    changes = _changes(context.server, [(name, value), *zip(more[::2], more[1::2], strict=True)])
    changed = sorted({*context.server.config.changed_fields, *changes})
    return context.server.gather(configure, {**changes, "changed_fields": changed}, lambda responses: OK)


def _changes(server: ServerContext, pairs: Sequence[tuple[bytes, bytes]]) -> Mapping[str, Any]:
    """Return the new values of ServerConfig's fields; PlainError for the first invalid pair, and nothing changes."""
    settings = settings_of(server)
    names = [name.decode("utf-8", "replace").lower() for name, _ in pairs]
    for at, (name, (as_typed, _)) in enumerate(zip(names, pairs, strict=True)):
        if name not in settings:
            raise PlainError(f"Unknown option or number of arguments for CONFIG SET - '{client_text(as_typed)}'")
        if not settings[name].is_modifiable:
            raise _failed(client_text(as_typed), "can't set immutable config")
        if name in names[:at]:
            raise _failed(client_text(as_typed), "duplicate parameter")
    changes: dict[str, Any] = {}
    for name, (_, value) in zip(names, pairs, strict=True):
        setting = settings[name]
        if setting.field:
            try:
                changes |= changes_of(name, value)
            except SettingError as error:
                raise _failed(name, str(error)) from None
        elif value.decode("utf-8", "replace") != setting.render(server):
            raise _failed(name, "can't set immutable config")
    return changes


def _failed(name: str, reason: str) -> PlainError:
    return PlainError(f"CONFIG SET failed (possibly related to argument '{name}') - {reason}")


@worker_query("configure")
def configure(server: ServerContext, changes: Mapping[str, Any]) -> None:
    """Change settings of this process."""
    server.configure(changes)


@command("config|resetstat")
def config_resetstat(context: CommandContext) -> Reply:
    """Resets the server's statistics."""
    return context.server.gather(reset_statistics, None, lambda responses: OK)


@worker_query("reset statistics")
def reset_statistics(server: ServerContext, nothing: None) -> None:
    """Reset the statistics of this process."""
    server.reset_statistics()


@command("config|rewrite")
def config_rewrite(context: CommandContext) -> Reply:
    """Persists the effective configuration to file."""
    server = context.server
    if server.config.config_file is None:
        raise PlainError("The server is running without a config file")
    # Imported here, because it takes 20 ms, and few servers rewrite a file.
    from resp_server.commands.config_rewrite import rewrite

    changed = set(server.config.changed_fields)
    values = {
        name: (setting.in_file or setting.render)(server)
        for name, setting in SETTINGS.items()
        if changed.intersection(setting.fields)
    }
    rewrite(server.config.config_file, server.config.config_table, values)
    return OK


@command("config|help")
def config_help(context: CommandContext) -> Reply:
    """Returns helpful text about the different subcommands."""
    return context.server.table.help("config")
