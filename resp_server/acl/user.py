"""A user: passwords and selectors, changed by rules as in ACL SETUSER and ACL files. Pure.

    user      on | off, nopass, passwords as SHA-256
    └─ selectors: the root selector has the user's own rules; each `( ... )` adds another selector

A request is allowed if one selector allows all of it: the command, each key and each channel.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from hmac import compare_digest
from typing import Any

from resp_server.acl.denial import Denial, Reason
from resp_server.acl.rate_limits import RateLimiter
from resp_server.acl.selector import KeyAccess, RuleError, Selector, access_of, matches_any
from resp_server.command.table import Command, CommandTable
from resp_server.protocol.errors import ProtocolError
from resp_server.protocol.glob import Matches
from resp_server.protocol.inline import inline_arguments
from resp_server.session.account import Account

# Limits of one ACL SETUSER, rules within selectors included (guess: some 20 us for a rule), and of one user: selectors,
# and patterns and passwords together. A line of an ACL file may have more rules.
RULES_MAX = 512
RULES_BYTES_MAX = 64 << 10
SELECTORS_MAX = 64
PARTS_MAX = 1024

DEFAULT_USER = b"default"
HASH = re.compile(rb"[0-9a-f]{64}")

# Redis' texts.
BAD_HASH = "The password hash must be exactly 64 characters and contain only lowercase hexadecimal characters"
NO_PASSWORD = "The password you are trying to remove from the user does not exist"

# For rules that name no command.
NO_COMMANDS = CommandTable({}, ())


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
        return matches_any(self.read_patterns)

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
                found = [(at, access_of(flags)) for at, flags in command.keys_in(request)]
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


def _check_rules(words: Sequence[bytes]) -> None:
    """Raise RuleError for more rules than one ACL SETUSER may have."""
    size = sum(map(len, words))
    if size <= RULES_MAX:
        return  # each rule has a byte
    if size <= RULES_BYTES_MAX and sum(len(word.split()) for word in words) <= RULES_MAX:
        return
    raise RuleError(f"ACL SETUSER takes {RULES_MAX} rules of {RULES_BYTES_MAX >> 10} KiB at once; send several of them")


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
