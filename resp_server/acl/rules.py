"""A user's permissions: rules as in ACL SETUSER and ACL files, and the checks of requests against them. Pure.

    user      on | off, nopass, passwords as SHA-256
    └─ selectors: the root selector has the user's own rules; each `( ... )` adds another selector
         commands    +get -config +config|get +@read -@dangerous +select|0
         keys        ~pattern %R~pattern %W~pattern
         channels    &pattern

A request is allowed if one selector allows all of it: the command, each key and each channel. Rules have the effect and
the text that they have in Redis 7.4.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, IntFlag
from functools import cached_property
from hashlib import sha256
from hmac import compare_digest
from typing import Any, NamedTuple

from resp_server.acl.rate_limits import RateLimiter
from resp_server.command.table import Command, CommandTable
from resp_server.protocol.errors import ProtocolError
from resp_server.protocol.glob import PATTERN_BYTES_MAX, SHORT_BYTES_MAX, Matches, matcher, translate
from resp_server.protocol.inline import inline_arguments
from resp_server.session.account import Account

# In the order of Redis' ACL CAT.
CATEGORIES = (
    "keyspace", "read", "write", "set", "sortedset", "list", "hash", "string", "bitmap", "hyperloglog", "geo", "stream",
    "pubsub", "admin", "fast", "slow", "blocking", "dangerous", "connection", "transaction", "scripting",
)  # fmt: skip

# Limits of one ACL SETUSER, rules within selectors included (guess: some 20 us for a rule), and of one user: selectors,
# and patterns and passwords together. A line of an ACL file may have more rules.
RULES_MAX = 512
RULES_BYTES_MAX = 64 << 10
SELECTORS_MAX = 64
PARTS_MAX = 1024

DEFAULT_USER = b"default"
HASH = re.compile(rb"[0-9a-f]{64}")
BLANK = re.compile(rb"[\s\0]")

# Redis' texts.
SYNTAX = "Syntax error"
UNKNOWN = "Unknown command or category name in ACL"
BAD_HASH = "The password hash must be exactly 64 characters and contain only lowercase hexadecimal characters"
NO_PASSWORD = "The password you are trying to remove from the user does not exist"
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


class Reason(IntEnum):
    """Why a request is denied, in Redis' order: the highest reason of all selectors is reported."""

    COMMAND = 1
    KEY = 2
    AUTH = 3
    CHANNEL = 4


class Denial(NamedTuple):
    """The reason of a denial, and the position of the denied word in the request; 0 is the command."""

    reason: Reason
    position: int


def denial_text(reason: Reason, user: bytes, command: str, denied: bytes | None = None) -> str:
    """Return Redis' text of a denial; with `denied`, the text of ACL DRYRUN, which names the key or channel."""
    name = user.decode("utf-8", "surrogateescape")
    if reason is Reason.COMMAND:
        return f"User {name} has no permissions to run the '{command}' command"
    kind = "key" if reason is Reason.KEY else "channel"
    if denied is None:
        return f"No permissions to access a {kind}"
    return f"User {name} has no permissions to access the '{denied.decode('utf-8', 'surrogateescape')}' {kind}"


# The error within EXEC's reply for a queued command that the user may not run any more.
EXEC_DENIAL = (
    "ACLs rules changed between the moment the transaction was accumulated and the EXEC call. This command is no "
    "longer allowed for the following reason: {}"
)
EXEC_DENIAL_REASONS = {
    Reason.COMMAND: "no permission to execute the command or subcommand",
    Reason.KEY: "no permission to touch the specified keys",
    Reason.CHANNEL: "no permission to access one of the channels used as arguments to the command",
}


# For rules that name no command.
NO_COMMANDS = CommandTable({}, ())


def _matches_any(patterns: Sequence[bytes]) -> Matches:
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
            found = _matches_any([each for each, allowed in self.keys.items() if allowed & access == access])
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
            self._channel_matches = _matches_any(self.channels)
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


# Returns the positions of a request's keys and how each is accessed; computed only when called.
KeyPositions = Callable[[], Sequence[tuple[int, KeyAccess]]]


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


def _check_rules(words: Sequence[bytes]) -> None:
    """Raise RuleError for more rules than one ACL SETUSER may have."""
    size = sum(map(len, words))
    if size <= RULES_MAX:
        return  # each rule has a byte
    if size <= RULES_BYTES_MAX and sum(len(word.split()) for word in words) <= RULES_MAX:
        return
    raise RuleError(f"ACL SETUSER takes {RULES_MAX} rules of {RULES_BYTES_MAX >> 10} KiB at once; send several of them")


class User(Account):
    """A user: a name, passwords and selectors, the first of which is the root selector. A new user is off.

    Sessions reference their user, so changes apply to them at once. rate_limiter: None without a limit.
    """

    def __init__(self, name: bytes, known_commands: CommandTable | None = None) -> None:
        self.name = name
        self.rate_limiter: RateLimiter | None = None
        self.reads_committed = False
        self.was_used = False  # a client has logged in as this user
        self.compiled: Any = None  # the compiled core's form of the rules, made when first needed
        self._known_commands = NO_COMMANDS if known_commands is None else known_commands
        self.is_on = False
        self.is_nopass = False
        self.sanitizes_payload = True
        self.passwords: list[bytes] = []
        self.selectors = [Selector(self._known_commands)]

    @classmethod
    def default(cls, known_commands: CommandTable | None = None) -> User:
        """Return a new `default` user: on, without a password, everything allowed."""
        made = cls(DEFAULT_USER, known_commands)
        for rule in (b"+@all", b"~*", b"&*", b"on", b"nopass"):
            made.apply(rule)
        return made

    def copy(self) -> User:
        """Return a copy, on which changes can be tried."""
        made = User(self.name, self._known_commands)
        made.take_rules_of(self)
        made.passwords, made.selectors = list(self.passwords), [selector.copy() for selector in self.selectors]
        return made

    def take_rules_of(self, other: User) -> None:
        """Replace all rules by those of another user, which is not used any more."""
        self.is_on, self.is_nopass, self.sanitizes_payload = other.is_on, other.is_nopass, other.sanitizes_payload
        self.passwords, self.selectors = other.passwords, other.selectors
        self._clear_cached()

    def _clear_cached(self) -> None:
        """Clear everything that is derived from the rules."""
        self.compiled = None
        for name in CACHED_PROPERTIES:
            self.__dict__.pop(name, None)

    # -- rules --------------------------------------------------------------------------------------------------------

    def apply_all(self, words: Sequence[bytes]) -> None:
        """Apply all rules or none; RuleError with the text of ACL SETUSER."""
        _check_rules(words)
        if all(word.lower() in USER_FLAGS for word in words):
            for word in words:
                self.apply(word)  # these rules cannot fail
            return
        staged = self.copy()
        for rule in merge_selectors(words):
            try:
                staged.apply(rule)
            except RuleError as error:
                rule_text = rule.decode("utf-8", "surrogateescape")
                raise RuleError(f"Error in ACL SETUSER modifier '{rule_text}': {error}") from None
        staged.check_size()
        self.take_rules_of(staged)

    def check_size(self) -> None:
        """Raise RuleError for too many patterns, passwords or selectors."""
        parts = len(self.passwords) + sum(len(selector.keys) + len(selector.channels) for selector in self.selectors)
        if parts > PARTS_MAX or len(self.selectors) > SELECTORS_MAX:
            raise RuleError(
                f"a user may have {PARTS_MAX} patterns and passwords, and {SELECTORS_MAX} selectors; "
                "this one would have more"
            )

    def apply(self, rule: bytes) -> None:
        """Apply one rule; RuleError."""
        self._clear_cached()
        set_flag = USER_FLAGS.get(rule.lower())
        if not rule:
            return
        if set_flag is not None:
            set_flag(self)
        elif rule[:1] in b"><#!":
            self._change_passwords(rule[:1], rule[1:])
        elif rule[:1] == b"(" and rule[-1:] == b")":
            selector = Selector(self._known_commands)
            for each in _selector_rules(rule[1:-1]):
                selector.apply(each)
            self.selectors.append(selector)
        else:
            self.selectors[0].apply(rule)

    def _change_passwords(self, sign: bytes, text: bytes) -> None:
        if sign in b"><":
            text = password_hash(text)
        elif not HASH.fullmatch(text):
            raise RuleError(BAD_HASH)
        if sign in b">#":
            if text not in self.passwords:
                self.passwords.append(text)
            self.is_nopass = False
        elif text in self.passwords:
            self.passwords.remove(text)
        else:
            raise RuleError(NO_PASSWORD)

    def _switch(self, is_on: bool) -> None:
        self.is_on = is_on

    def _sanitize(self, sanitizes_payload: bool) -> None:
        self.sanitizes_payload = sanitizes_payload

    def _reset_passwords(self, is_nopass: bool) -> None:
        self.is_nopass, self.passwords = is_nopass, []

    def _clear_selectors(self) -> None:
        del self.selectors[1:]

    def _reset(self) -> None:
        self.take_rules_of(User(self.name, self._known_commands))

    @property
    def flags(self) -> Sequence[bytes]:
        """The flags of ACL GETUSER."""
        return [
            b"on" if self.is_on else b"off",
            *([b"nopass"] if self.is_nopass else []),
            b"sanitize-payload" if self.sanitizes_payload else b"skip-sanitize-payload",
        ]

    @property
    def rule_lists(self) -> list[list[bytes]]:
        """The rules of the root selector and of each further one; `from_rule_lists` makes an equal user of them."""
        root, *others = self.selectors
        passwords = [b"#" + password for password in self.passwords]
        return [[*self.flags, *passwords, *root.rules], *(each.rules for each in others)]

    @classmethod
    def from_rule_lists(cls, name: bytes, rule_lists: Sequence[Sequence[bytes]], known_commands: CommandTable) -> User:
        """Make a user of `rule_lists`."""
        made = cls(name, known_commands)
        for rule in rule_lists[0]:
            made.apply(rule)
        for rules in rule_lists[1:]:
            selector = Selector(known_commands)
            for rule in rules:
                selector.apply(rule)
            made.selectors.append(selector)
        return made

    @cached_property
    def text(self) -> bytes:
        """All rules, as in an ACL file."""
        root, *others = self.rule_lists
        return b" ".join([*root, *(b"(%b)" % b" ".join(each) for each in others)])

    @cached_property
    def line(self) -> bytes:
        """The line of an ACL file."""
        return b"user %b %b" % (self.name, self.text)

    # -- checks -------------------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Return whether a client may be this user without a password."""
        return self.is_on and self.is_nopass

    def accepts_password(self, password: bytes) -> bool:
        """Return whether a client with this password may log in as this user."""
        if self.is_nopass and self.is_on:
            return True
        digest = password_hash(password)
        is_correct = sum(compare_digest(digest, each) for each in self.passwords) > 0  # in constant time: compares all
        return self.is_on and (self.is_nopass or is_correct)

    @cached_property
    def is_unrestricted(self) -> bool:
        """Return whether every request is allowed."""
        return any(selector.is_unrestricted for selector in self.selectors)

    @cached_property
    def reads_all_keys(self) -> bool:
        """Return whether the user may read every key, with some command."""
        return any(b"*" in selector.patterns(KeyAccess.READ) for selector in self.selectors)

    @cached_property
    def _reads(self) -> Matches:
        return _matches_any(self.read_patterns)

    @cached_property
    def read_patterns(self) -> Sequence[bytes]:
        """The patterns of keys that the user may read, with some command."""
        return list(dict.fromkeys(each for selector in self.selectors for each in selector.patterns(KeyAccess.READ)))

    def can_read(self, key: bytes) -> bool:
        """Return whether the user may read a key with some command, so may see its name."""
        return self.reads_all_keys or bool(self._reads(key))

    def can_subscribe(self, channel: bytes, *, is_pattern: bool = False) -> bool:
        """Return whether the user may use a channel."""
        return any(selector.allows_channel(channel, is_pattern=is_pattern) for selector in self.selectors)

    def denial(self, command: Command, request: Sequence[bytes]) -> Denial | None:
        """Return why a request is denied; None: allowed. The denial with the highest reason of all selectors counts."""
        if self.is_unrestricted:
            return None
        found: Sequence[tuple[int, KeyAccess]] | None = None

        def keys() -> Sequence[tuple[int, KeyAccess]]:
            nonlocal found
            if found is None:
                found = [(at, _access_of(flags)) for at, flags in command.keys_in(request)]
            return found

        furthest = Denial(Reason.COMMAND, 0)
        for selector in self.selectors:
            denied = selector.denial(command, request, keys)
            if denied is None:
                return None
            furthest = max(furthest, denied)
        return furthest


CACHED_PROPERTIES = [name for name, value in vars(User).items() if isinstance(value, cached_property)]

USER_FLAGS: Mapping[bytes, Callable[[User], None]] = {
    b"on": lambda user: user._switch(True),
    b"off": lambda user: user._switch(False),
    b"skip-sanitize-payload": lambda user: user._sanitize(False),
    b"sanitize-payload": lambda user: user._sanitize(True),
    b"nopass": lambda user: user._reset_passwords(True),
    b"resetpass": lambda user: user._reset_passwords(False),
    b"clearselectors": lambda user: user._clear_selectors(),
    b"reset": lambda user: user._reset(),
}


def _access_of(flags: Sequence[str]) -> KeyAccess:
    access = KeyAccess(0)
    for flag in flags:
        access |= ACCESS_OF_FLAG.get(flag, KeyAccess(0))
    return access


def _selector_rules(text: bytes) -> list[bytes]:
    """Return the rules within `( ... )`, which may be quoted; none if a quote is not closed, as in Redis."""
    try:
        return inline_arguments(text)
    except ProtocolError:
        return []


def password_hash(password: bytes) -> bytes:
    """Return a password's SHA-256, as ACL rules have it."""
    return sha256(password).hexdigest().encode()


def merge_selectors(words: Sequence[bytes]) -> list[bytes]:
    """Join the words of each `( ... )` to one rule; RuleError for an unmatched parenthesis."""
    merged: list[bytes] = []
    opened: list[bytes] = []
    for word in words:
        if opened or (word[:1] == b"(" and word[-1:] != b")"):
            opened.append(word)
            if len(opened) > 1 and word[-1:] == b")":
                merged.append(b" ".join(opened))
                opened = []
        else:
            merged.append(word)
    if opened:
        rule_text = opened[0].decode("utf-8", "surrogateescape")
        raise RuleError(f"Unmatched parenthesis in acl selector starting at '{rule_text}'.")
    return merged
