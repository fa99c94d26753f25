"""CONFIG: the settings in Redis' names, and those of them that may change while the server runs.

A setting that may change is a field of `ServerConfig`, which every process of the server replaces at once
(`ServerContext.configure`); whoever acts on it looks at `ServerContext.config` each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from resp_server.command_table.declaration import OneOrMore, command, integer, question
from resp_server.execution.context import CommandContext, ServerContext
from resp_server.net.listeners import ACCEPTED_MAX
from resp_server.net.tls import ACCEPTS_AT_ONCE
from resp_server.protocol.errors import PlainError, ReplyError, syntax_error, typed
from resp_server.protocol.glob import matcher
from resp_server.protocol.replies import OK, Reply, Sliced
from resp_server.push.keyspace_notifications import ClassesError, classes_of, letters_of, shown_letters

GLOB_MARKS = frozenset(b"*?[")
INT32_MAX = 2**31 - 1
CLIENTS_MAX = 2**32 - 1
MIB = 1 << 20
# What may wait to be sent to a client, may be asked at once, and may be one word of it, whatever is set.
OUTPUT_BYTES_MAX = QUERY_BUFFER_BYTES_MAX = 1 << 30
BULK_BYTES_MAX = 512 << 20
UNITS = {"": 1, "b": 1, "k": 1000, "kb": 1 << 10, "m": 10**6, "mb": 1 << 20, "g": 10**9, "gb": 1 << 30}

Show = Callable[[ServerContext], str]
Read = Callable[[bytes], Any]


class SettingError(ValueError):
    """A value that a setting cannot have; the text is Redis'."""


@dataclass(frozen=True)
class Setting:
    """One setting: how CONFIG GET shows it, and how CONFIG SET reads what a field of ServerConfig becomes, or several.

    Without a field it stays what it is. `is_variable`: Redis can change it, so that to set what it is already is no
    error; others are refused whatever they are set to.
    """

    show: Show
    field: str = ""
    read: Read = bytes.decode
    is_variable: bool = False


def shown(field: str) -> Setting:
    """Declare a setting of the start that is shown as it is."""
    return Setting(lambda server: _text(getattr(server.config, field)))


def fixed(value: str) -> Setting:
    """Declare a setting of Redis that can be nothing else here."""
    return Setting(lambda server: value, is_variable=True)


def changing(field: str, read: Read, show: Callable[[Any], str] | None = None) -> Setting:
    """Declare a setting that may change while the server runs. show: its text, if that is not plain."""
    return Setting(lambda server: (show or _text)(getattr(server.config, field)), field, read, True)


def number(least: int, most: int) -> Read:
    """Return a reader of whole numbers."""

    def read(word: bytes) -> int:
        try:
            found = integer(word)
        except ReplyError:
            raise SettingError("argument couldn't be parsed into an integer") from None
        return _within(found, least, most)

    return read


def size(least: int, most: int) -> Read:
    """Return a reader of numbers of bytes, such as `64mb`."""

    def read(word: bytes) -> int:
        text = word.decode("latin-1").lower()
        digits = text.rstrip("bkmg")
        unit = UNITS.get(text[len(digits) :])
        if unit is None or not digits.isdecimal() or not digits.isascii():
            raise SettingError("argument must be a memory value")
        return _within(int(digits) * unit, least, most)

    return read


def yes_or_no(word: bytes) -> bool:
    """Read a switch."""
    if word.lower() not in (b"yes", b"no"):
        raise SettingError("argument must be 'yes' or 'no'")
    return word.lower() == b"yes"


def _within(found: int, least: int, most: int) -> int:
    if not least <= found <= most:
        raise SettingError(f"argument must be between {least} and {most} inclusive")
    return found


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return " ".join(value) if isinstance(value, tuple) else "" if value is None else str(value)


def _port(server: ServerContext) -> str:
    return str(server.port if server.port != server.tls_port else 0)


# The limits of each class of clients: hard, soft, and seconds.
OUTPUT_LIMITS = {
    "normal": ("output_bytes_max", "output_soft_bytes", "output_soft_seconds"),
    "pubsub": ("subscriber_output_bytes_max", "subscriber_output_soft_bytes", "subscriber_output_soft_seconds"),
}


def _output_limits(server: ServerContext) -> str:
    return " ".join(
        f"{name} {' '.join(str(getattr(server.config, field)) for field in fields)}"
        for name, fields in OUTPUT_LIMITS.items()
    )


def output_limits(word: bytes) -> Mapping[str, int]:
    """Read `normal 1gb 0 0 pubsub 32mb 8mb 60`, or one of the two; nothing may wait without a hard limit."""
    words = word.decode("latin-1").split()
    if not words or len(words) % 4:
        raise SettingError("Wrong number of arguments in buffer limit configuration.")
    found: dict[str, int] = {}
    for name, hard, soft, seconds in zip(*[iter(words)] * 4, strict=True):
        if name.lower() not in OUTPUT_LIMITS:
            raise SettingError("Invalid client class specified in buffer limit configuration.")
        try:
            sizes = (size(1, OUTPUT_BYTES_MAX)(hard.encode()), size(0, OUTPUT_BYTES_MAX)(soft.encode()))
            limits = (*sizes, number(0, INT32_MAX)(seconds.encode()))
        except SettingError:
            text = "Error in hard, soft or soft_seconds setting in buffer limit configuration."
            raise SettingError(f"{text} A hard limit is 1 to {OUTPUT_BYTES_MAX}") from None
        found |= zip(OUTPUT_LIMITS[name.lower()], limits, strict=True)
    return found


def event_classes(word: bytes) -> str:
    """Read the classes of events to notify of; return them each by its letter."""
    try:
        return letters_of(classes_of(word.decode("latin-1")))
    except ClassesError as error:
        raise SettingError(str(error)) from None


SETTINGS: dict[str, Setting] = {
    "aclfile": shown("acl_file"),
    "acl-pubsub-default": fixed("resetchannels"),
    "acllog-max-len": changing("acl_log_entries_max", number(0, 2**63 - 1)),
    "appendonly": fixed("no"),
    "bind": shown("hosts"),
    "client-query-buffer-limit": changing("query_buffer_bytes_max", size(MIB, QUERY_BUFFER_BYTES_MAX)),
    "client-output-buffer-limit": Setting(_output_limits, "output_bytes_max", output_limits, is_variable=True),
    "cluster-enabled": Setting(lambda server: "no" if server.cluster is None else "yes"),
    "daemonize": Setting(lambda server: "no"),
    "databases": shown("databases"),
    "hide-user-data-from-log": fixed("no"),
    "io-threads": Setting(lambda server: "1"),
    "latency-monitor-threshold": changing("latency_over_ms", number(0, 2**63 - 1)),
    "latency-tracking": fixed("yes"),
    "latency-tracking-info-percentiles": fixed("50 99 99.9"),
    "locale-collate": fixed("C"),  # SORT_RO ALPHA compares bytes
    "max-new-connections-per-cycle": fixed(str(ACCEPTED_MAX)),
    "max-new-tls-connections-per-cycle": fixed(str(ACCEPTS_AT_ONCE)),
    "maxclients": changing("clients_max", number(1, CLIENTS_MAX)),
    "maxmemory": fixed("0"),
    "maxmemory-policy": fixed("noeviction"),
    "notify-keyspace-events": changing("notify_events", event_classes, shown_letters),
    "port": Setting(_port, is_variable=True),
    "protected-mode": changing("protected_mode", yes_or_no),
    "proto-max-bulk-len": changing("bulk_bytes_max", size(MIB, BULK_BYTES_MAX)),
    "replica-read-only": fixed("yes"),
    "replica-serve-stale-data": fixed("yes"),
    "requirepass": changing("password", lambda word: word.decode("utf-8", "surrogateescape") or None),
    "save": fixed(""),
    "slave-read-only": fixed("yes"),
    "slave-serve-stale-data": fixed("yes"),
    "slowlog-log-slower-than": changing("slow_over_us", number(-1, 2**63 - 1)),
    "slowlog-max-len": changing("slow_entries_max", number(0, 2**63 - 1)),
    "tcp-backlog": shown("backlog_connections"),
    "tcp-keepalive": changing("tcp_keepalive_seconds", number(0, INT32_MAX)),
    "tracking-table-max-keys": changing("tracked_keys_max", number(0, 2**63 - 1)),
    "tls-port": Setting(lambda server: str(server.tls_port), is_variable=True),
    "timeout": changing("idle_timeout_seconds", number(0, INT32_MAX)),
}


TLS_FIELDS = {"tls-cert-file": "cert", "tls-key-file": "key", "tls-ca-cert-file": "ca"}


def of_tls(field: str) -> Setting:
    """Declare one of the files of TLS; new ones are read by themselves."""
    return Setting(lambda server: _text(getattr(server.config.tls, field)))


def settings_of(server: ServerContext) -> Mapping[str, Setting]:
    """Return the settings that a server has."""
    settings = dict(SETTINGS)
    if server.config.tls is not None:
        settings |= {name: of_tls(field) for name, field in TLS_FIELDS.items()}
    if server.cluster is not None:  # keys are answered while others are nobody's
        settings["cluster-require-full-coverage"] = fixed("no")
    return settings


# Patterns that are looked for at once (guess: some 50 us each).
PATTERNS_AT_ONCE = 16


@command("config|get")
def config_get(context: CommandContext, *patterns: OneOrMore) -> Reply:
    """Returns the effective values of configuration parameters."""
    settings = settings_of(context.server)
    if len(patterns) <= PATTERNS_AT_ONCE:
        shown = [word for part in _shown(context.server, settings, patterns) for word in part]
        return dict(zip(shown[::2], shown[1::2], strict=True))
    return Sliced(_shown(context.server, settings, patterns), lambda: None, dict)


def _shown(
    server: ServerContext, settings: Mapping[str, Setting], patterns: Sequence[bytes]
) -> Iterator[Sequence[bytes]]:
    """Find the settings that patterns name; show them, a name and a value in turn, once all are found."""
    found: dict[str, bytes] = {}  # by their names, as the client typed them first
    for pattern in patterns:
        yield []
        glob = pattern.partition(b"\0")[0]  # to Redis a pattern ends there, a name does not
        if not GLOB_MARKS.intersection(glob):
            name = pattern.decode("utf-8", "replace").lower()
            if name in settings:
                found.setdefault(name, pattern)
            continue
        matches = matcher(glob, ignore_case=True)
        for name in settings:
            if matches(name.encode()):
                found.setdefault(name, name.encode())
    yield [word for name, typed in found.items() for word in (typed, settings[name].show(server).encode())]


@command("config|set")
def config_set(context: CommandContext, name: bytes, value: bytes, *more: bytes) -> Reply:
    """Sets configuration parameters in-flight."""
    if len(more) % 2:
        raise syntax_error()
    changes = _changes(context.server, [(name, value), *zip(more[::2], more[1::2], strict=True)])
    return context.server.gather(configure, changes, lambda answers: OK)


def _changes(server: ServerContext, pairs: Sequence[tuple[bytes, bytes]]) -> Mapping[str, Any]:
    """Return what fields of ServerConfig become; PlainError for the first pair that cannot be, and nothing changes."""
    settings = settings_of(server)
    names = [name.decode("utf-8", "replace").lower() for name, _ in pairs]
    for at, (name, (as_typed, _)) in enumerate(zip(names, pairs, strict=True)):
        if name not in settings:
            raise PlainError(f"Unknown option or number of arguments for CONFIG SET - '{typed(as_typed)}'")
        if not settings[name].is_variable:
            raise _failed(typed(as_typed), "can't set immutable config")
        if name in names[:at]:
            raise _failed(typed(as_typed), "duplicate parameter")
    changes: dict[str, Any] = {}
    for name, (_, value) in zip(names, pairs, strict=True):
        setting = settings[name]
        if setting.field:
            try:
                found = setting.read(value)
                changes |= found if isinstance(found, dict) else {setting.field: found}
            except SettingError as error:
                raise _failed(name, str(error)) from None
        elif value.decode("utf-8", "replace") != setting.show(server):
            raise _failed(name, "can't set immutable config")
    return changes


def _failed(name: str, reason: str) -> PlainError:
    return PlainError(f"CONFIG SET failed (possibly related to argument '{name}') - {reason}")


@question("configure")
def configure(server: ServerContext, changes: Mapping[str, Any]) -> None:
    """Change settings of this process."""
    server.configure(changes)


@command("config|resetstat")
def config_resetstat(context: CommandContext) -> Reply:
    """Resets the server's statistics."""
    return context.server.gather(reset_statistics, None, lambda answers: OK)


@question("reset statistics")
def reset_statistics(server: ServerContext, nothing: None) -> None:
    """Count from zero again in this process."""
    server.reset_statistics()


@command("config|rewrite")
def config_rewrite(context: CommandContext) -> Reply:
    """Persists the effective configuration to file."""
    raise PlainError("The server is running without a config file")


@command("config|help")
def config_help(context: CommandContext) -> Reply:
    """Returns helpful text about the different subcommands."""
    return context.server.table.help("config")
