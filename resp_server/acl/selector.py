"""A selector: one set of a user's permissions, which the rules of commands, keys and channels change. Pure.

    commands    +get -config +config|get +@read -@dangerous +select|0
    keys        ~pattern %R~pattern %W~pattern
    channels    &pattern

Rules have the effect and the text that they have in Redis 7.4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import IntFlag

from resp_server.acl.denial import Denial, Reason
from resp_server.command.table import Command, CommandTable
from resp_server.protocol.glob import PATTERN_BYTES_MAX, SHORT_BYTES_MAX, Matches, matcher, translate

# In the order of Redis' ACL CAT.
CATEGORIES = (
    "keyspace", "read", "write", "set", "sortedset", "list", "hash", "string", "bitmap", "hyperloglog", "geo", "stream",
    "pubsub", "admin", "fast", "slow", "blocking", "dangerous", "connection", "transaction", "scripting",
)  # fmt: skip

BLANK = re.compile(rb"[\s\0]")

# Redis' texts.
SYNTAX = "Syntax error"
UNKNOWN = "Unknown command or category name in ACL"
SUBCOMMAND_FIRST_ARG = "Allowing first-arg of a subcommand is not supported"
_PATTERN_AFTER_ALL = (
    "Adding a pattern after the * pattern (or the '{}' flag) is not valid and does not have any effect. Try '{}' to "
    "start with an empty list of {}"
)
AFTER_ALL_KEYS = _PATTERN_AFTER_ALL.format("allkeys", "resetkeys", "patterns")
AFTER_ALL_CHANNELS = _PATTERN_AFTER_ALL.format("allchannels", "resetchannels", "channels")


class RuleError(Exception):
    """An invalid rule; the text is Redis'."""

    @property
    def is_unknown(self) -> bool:
        """Return whether the rule names a command or category that does not exist."""
        return str(self) == UNKNOWN


class KeyAccess(IntFlag):
    """How a command accesses a key."""

    READ = 1
    WRITE = 2


READ_AND_WRITE = KeyAccess.READ | KeyAccess.WRITE
# Flag of a key specification to the access that it means.
ACCESS_OF_FLAG = {
    "access": KeyAccess.READ,
    "insert": KeyAccess.WRITE,
    "delete": KeyAccess.WRITE,
    "update": KeyAccess.WRITE,
}
PREFIX_OF_ACCESS = {READ_AND_WRITE: b"~", KeyAccess.READ: b"%R~", KeyAccess.WRITE: b"%W~"}

# Returns the positions of a request's keys and how each is accessed; computed only when called.
KeyPositions = Callable[[], Sequence[tuple[int, KeyAccess]]]


class Selector:
    """One set of permissions; a new selector allows nothing."""

    def __init__(self, known_commands: CommandTable) -> None:
        self._known_commands = known_commands
        # True: the commands are +@all with the rules applied; False: -@all with the rules applied.
        self.starts_with_all = False
        self.has_all_commands = False
        self.command_rules: list[bytes] = []
        self.commands: frozenset[str] = frozenset()
        # By command: the first arguments with which alone it is allowed.
        self.first_args: dict[str, set[bytes]] = {}
        self.has_all_keys = False
        self.keys: dict[bytes, KeyAccess] = {}
        self.has_all_channels = False
        self.channels: list[bytes] = []
        self._key_matches: dict[KeyAccess, Matches] = {}
        self._channel_matches: Matches | None = None

    def copy(self) -> Selector:
        """Return a selector with the same permissions."""
        made = Selector(self._known_commands)
        made.starts_with_all, made.has_all_commands = self.starts_with_all, self.has_all_commands
        made.has_all_keys, made.has_all_channels = self.has_all_keys, self.has_all_channels
        made.command_rules, made.commands = list(self.command_rules), self.commands
        made.first_args = {name: set(words) for name, words in self.first_args.items()}
        made.keys, made.channels = dict(self.keys), list(self.channels)
        return made

    # -- rules --------------------------------------------------------------------------------------------------------

    def apply(self, rule: bytes) -> None:
        """Apply one rule; RuleError."""
        self._key_matches, self._channel_matches = {}, None
        match rule.lower():
            case b"allkeys" | b"~*":
                self.has_all_keys, self.keys = True, {}
            case b"resetkeys":
                self.has_all_keys, self.keys = False, {}
            case b"allchannels" | b"&*":
                self.has_all_channels, self.channels = True, []
            case b"resetchannels":
                self.has_all_channels, self.channels = False, []
            case b"allcommands" | b"+@all":
                self._set_all(is_allowed=True)
            case b"nocommands" | b"-@all":
                self._set_all(is_allowed=False)
            case _:
                self._apply_named(rule)

    def _apply_named(self, rule: bytes) -> None:
        sign, name = rule[:1], rule[1:]
        if sign in (b"~", b"%"):
            self._add_key(rule)
        elif sign == b"&":
            self._add_channel(name)
        elif sign not in (b"+", b"-"):
            raise RuleError(SYNTAX)
        elif name[:1] == b"@":
            self._set_category(name, sign == b"+")
        elif sign == b"+" and b"|" in name:
            self._allow_subcommand_or_first_arg(name)
        else:
            found = self._command(name)
            self._set_command(found, sign == b"+")
            self._record(found.name.encode(), sign)

    def _set_all(self, *, is_allowed: bool) -> None:
        self.starts_with_all = self.has_all_commands = is_allowed
        self.commands = self._known_commands.names if is_allowed else frozenset()
        self.command_rules, self.first_args = [], {}

    def _add_key(self, rule: bytes) -> None:
        if self.has_all_keys:
            raise RuleError(AFTER_ALL_KEYS)
        access, pattern = READ_AND_WRITE, rule[1:]
        if rule[:1] == b"%":
            signs, _, pattern = rule[1:].partition(b"~")
            signs_upper = signs.upper()
            if signs_upper not in (b"R", b"W", b"RW", b"WR"):
                raise RuleError(SYNTAX)
            access = KeyAccess(0)
            for sign in signs_upper:
                access |= KeyAccess.READ if sign == ord("R") else KeyAccess.WRITE
        _check_pattern(pattern)
        self.keys[pattern] = self.keys[pattern] | access if pattern in self.keys else access

    def _add_channel(self, pattern: bytes) -> None:
        if self.has_all_channels:
            raise RuleError(AFTER_ALL_CHANNELS)
        _check_pattern(pattern)
        if pattern not in self.channels:
            self.channels.append(pattern)

    def _set_category(self, name: bytes, is_allowed: bool) -> None:
        category = name.decode("latin-1").lower()
        if category[1:] not in CATEGORIES:
            raise RuleError(UNKNOWN)
        self._record(name.lower(), b"+" if is_allowed else b"-")
        self._set_names(self._known_commands.names_in(category), is_allowed)

    def _allow_subcommand_or_first_arg(self, name: bytes) -> None:
        """Allow `command|subcommand`, or `command|first-arg`."""
        whole, _, part = name.rpartition(b"|")
        found = self._command(whole)
        if "|" in found.name:
            raise RuleError(SUBCOMMAND_FIRST_ARG)
        if not part:
            raise RuleError(SYNTAX)
        if found.subcommands:
            self._set_command(self._command(name), is_allowed=True)
        else:
            self.first_args.setdefault(found.name, set()).add(part.lower())
        self._record(name.lower(), b"+")

    def _command(self, name: bytes) -> Command:
        found = self._known_commands.get(name)
        if found is None:
            raise RuleError(UNKNOWN)
        return found

    def _set_command(self, command: Command, is_allowed: bool) -> None:
        """Allow or forbid a command, with its subcommands."""
        self._set_names(frozenset([command.name, *(each.name for each in command.subcommands.values())]), is_allowed)

    def _set_names(self, names: frozenset[str], is_allowed: bool) -> None:
        for name in self.first_args.keys() & names:
            del self.first_args[name]
        self.commands = self.commands | names if is_allowed else self.commands - names
        self.has_all_commands = self.has_all_commands and is_allowed

    def _record(self, name: bytes, sign: bytes) -> None:
        """Record a command rule for the selector's text; it replaces earlier rules that it covers."""
        part = name + b"|"
        remaining = [rule for rule in self.command_rules if rule[1:] != name and not rule.startswith(part, 1)]
        self.command_rules = [*remaining, sign + name]

    # -- texts --------------------------------------------------------------------------------------------------------

    @property
    def commands_text(self) -> bytes:
        """The text of the command rules."""
        return b" ".join([b"+@all" if self.starts_with_all else b"-@all", *self.command_rules])

    @property
    def keys_text(self) -> bytes:
        """The text of the key rules."""
        if self.has_all_keys:
            return b"~*"
        return b" ".join(PREFIX_OF_ACCESS[access] + each for each, access in self.keys.items())

    @property
    def channels_text(self) -> bytes:
        """The text of the channel rules."""
        return b"&*" if self.has_all_channels else b" ".join(b"&" + channel for channel in self.channels)

    @property
    def rules(self) -> list[bytes]:
        """All rules; applied to a new selector, they make an equal one."""
        return [
            *([b"~*"] if self.has_all_keys else [_key_rule(each, access) for each, access in self.keys.items()]),
            *([b"&*"] if self.has_all_channels else [b"resetchannels", *(b"&" + channel for channel in self.channels)]),
            b"+@all" if self.starts_with_all else b"-@all",
            *self.command_rules,
        ]

    # -- checks -------------------------------------------------------------------------------------------------------

    @property
    def is_unrestricted(self) -> bool:
        """Return whether everything is allowed."""
        return self.has_all_commands and self.has_all_keys and self.has_all_channels

    def allows(self, command: Command, request: Sequence[bytes] = ()) -> bool:
        """Return whether a command is allowed; the request decides if only some first arguments are allowed."""
        if self.has_all_commands or command.name in self.commands or not command.facts.needs_auth:
            return True
        words = self.first_args.get(command.name)
        return words is not None and len(request) > 1 and request[1].lower() in words

    def allows_key(self, key: bytes, access: KeyAccess) -> bool:
        """Return whether this access to a key is allowed."""
        return self.has_all_keys or bool(self.key_matches(access)(key))

    def key_matches(self, access: KeyAccess) -> Matches:
        """Return a predicate: this access to a key is allowed by a pattern. Not for selectors with all keys."""
        found = self._key_matches.get(access)
        if found is None:
            found = matches_any([each for each, allowed in self.keys.items() if allowed & access == access])
            self._key_matches[access] = found
        return found

    def patterns(self, access: KeyAccess) -> Sequence[bytes]:
        """Return the patterns of keys with this access."""
        if self.has_all_keys:
            return [b"*"]
        return [each for each, allowed in self.keys.items() if allowed & access == access]

    def allows_channel(self, channel: bytes, *, is_pattern: bool) -> bool:
        """Return whether a channel is allowed; a pattern is allowed only if a rule has exactly this pattern."""
        if self.has_all_channels:
            return True
        if is_pattern:
            return channel in self.channels
        if self._channel_matches is None:
            self._channel_matches = matches_any(self.channels)
        return bool(self._channel_matches(channel))

    def denial(self, command: Command, request: Sequence[bytes], keys: KeyPositions) -> Denial | None:
        """Return why this selector denies a request; None: allowed."""
        if not self.allows(command, request):
            return Denial(Reason.COMMAND, 0)
        if not self.has_all_keys:
            for at, access in keys():
                if not self.allows_key(request[at], access):
                    return Denial(Reason.KEY, at)
        if not self.has_all_channels:
            for at, is_pattern in command.channels_in(request):
                if not self.allows_channel(request[at], is_pattern=is_pattern):
                    return Denial(Reason.CHANNEL, at)
        return None


def _key_rule(pattern: bytes, access: KeyAccess) -> bytes:
    """Return the rule that adds a pattern; for `*` not `~*`, which Redis writes but cannot load again."""
    if pattern == b"*" and access == READ_AND_WRITE:
        return b"%RW~*"
    return PREFIX_OF_ACCESS[access] + pattern


def _check_pattern(pattern: bytes) -> None:
    if len(pattern) > PATTERN_BYTES_MAX:
        raise RuleError(f"a pattern may have {PATTERN_BYTES_MAX} bytes")
    if BLANK.search(pattern):
        raise RuleError(SYNTAX)


def access_of(flags: Sequence[str]) -> KeyAccess:
    """Return the access that the flags of a key specification mean."""
    access = KeyAccess(0)
    for flag in flags:
        access |= ACCESS_OF_FLAG.get(flag, KeyAccess(0))
    return access


def matches_any(patterns: Sequence[bytes]) -> Matches:
    """Return a predicate: a text matches one of the globs."""
    if not patterns:
        return lambda text: False
    short = short_globs(patterns)
    of_short: Matches = re.compile(alternatives(short) if short else b"(?!)", re.DOTALL).fullmatch
    if len(short) == len(patterns):
        return of_short
    others = [matcher(pattern) for pattern in patterns if len(pattern) > SHORT_BYTES_MAX]
    return lambda text: of_short(text) or any(matches(text) for matches in others)


def short_globs(patterns: Sequence[bytes]) -> list[bytes]:
    """Return the globs that are short enough for a regular expression (see `resp_server.protocol.glob`)."""
    return [pattern for pattern in patterns if len(pattern) <= SHORT_BYTES_MAX]


def alternatives(patterns: Sequence[bytes]) -> bytes:
    """Return one regular expression (DOTALL) for several short globs."""
    return b"|".join(b"(?:%b)" % (b".*" if pattern == b"*" else translate(pattern)) for pattern in patterns)
