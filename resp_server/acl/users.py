"""All users by name, the ACL file, and changes of users across a server's processes.

The ACL file is Redis': a line `user <name> <rule> ...` for each user. It is loaded completely or not at all.

One process makes a change for all: it turns a `UserChange` into a `UserChangeResult` with the users' new rules, which
the other processes adopt.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict

from resp_server.acl.log import DenialLog
from resp_server.acl.rate_limits import RateLimit, RateLimiter
from resp_server.acl.selector import BLANK, RuleError
from resp_server.acl.user import DEFAULT_USER, User, merge_selectors, password_hash
from resp_server.command.table import CommandTable
from resp_server.session.account import Account
from state_backend.model.errors import SparkisError

log = logging.getLogger("sparkis.acl")

# The file is loaded on the event loop, so its size is limited (guess: more than any real file).
FILE_BYTES_MAX = 16 << 20
READ_BYTES = 64 << 10
USER_NAME_BYTES_MAX = 256
NOTHING_CHANGED = "WARNING: ACL errors detected, no change to the previously active ACL rules was performed"
NO_FILE = (
    "This Redis instance is not configured to use an ACL file. You may want to specify users via the ACL SETUSER "
    "command and then issue a CONFIG REWRITE (assuming you have a Redis configuration file set) in order to store "
    "users in the Redis configuration."
)
NOT_SAVED = "There was an error trying to save the ACLs. Please check the server logs for more information"


class AccessError(SparkisError):
    """Users cannot be loaded, changed or saved; the text is Redis'."""


# The rules of a user (see `User.rule_lists`).
RuleLists = list[list[str]]


class UserChange(TypedDict, total=False):
    """A change of users. Texts are bytes as latin-1."""

    set: list[str]  # a user's name and rules
    delete: list[str]  # names
    load: bool
    save: bool


@dataclass
class UserChangeResult:
    """The result of a change of users: an error, or the names of those that were changed, made or deleted."""

    error: str | None = None
    names: list[str] = field(default_factory=list)
    has_clients: bool = True  # a client may have logged in as one of them

    def to_json(self) -> dict[str, Any]:
        """Return the outcome for another process."""
        return {"error": self.error, "names": self.names}


class Users:
    """The users of a server. `default` always exists. A user stays the same object when its rules change.

    Args:
        path: The ACL file; None: no file.
        server_password: The password of the server's own proxies and of other nodes, for a login as `default`; their
            user is unrestricted and not listed.
        committed_only: The users who read committed values only.
    """

    def __init__(
        self,
        known_commands: CommandTable,
        password: str | None = None,
        path: str | None = None,
        limits: Sequence[RateLimit] = (),
        server_password: str | None = None,
        committed_only: Sequence[str] = (),
    ) -> None:
        self._known_commands = known_commands
        self.path = path
        self.denials = DenialLog()
        self._committed_only = {name.encode() for name in committed_only}
        self._rate_limiters = {limit.user.encode(): RateLimiter(limit) for limit in limits}
        self.default = self._with_settings(User.default(known_commands))
        self.default.was_used = True
        self._by_name = {DEFAULT_USER: self.default}
        self._sorted: list[User] = []  # the users in the order of their names; empty: to be made
        self._loaded: bytes | None = None  # the file's text, if the users are still those that it has
        if password is not None:
            self.set_password(password)
        self._server_user: User | None = None
        if server_password is not None:
            self._server_user = User.default(known_commands)
            _set_password(self._server_user, server_password)

    def __iter__(self) -> Any:
        if len(self._sorted) != len(self._by_name):
            self._sorted = [self._by_name[name] for name in sorted(self._by_name)]
        return iter(self._sorted)

    def __len__(self) -> int:
        return len(self._by_name)

    def get(self, name: bytes) -> User | None:
        """Return a user by name."""
        return self._by_name.get(name)

    def is_current(self, user: Account) -> bool:
        """Return whether a session's user still exists."""
        return user is self._server_user or self._by_name.get(user.name) is user

    def log_in(self, name: bytes, password: bytes) -> User | None:
        """Return the user if the password is correct."""
        if self._server_user is not None and name == DEFAULT_USER and self._server_user.accepts_password(password):
            return self._server_user
        user = self._by_name.get(name)
        if user is None:
            password_hash(password)  # takes as long as for an existing user
            return None
        return user if user.accepts_password(password) else None

    def set_password(self, password: str | None) -> None:
        """Make this the only password of `default`; None: no password is needed."""
        self._loaded = None
        _set_password(self.default, password)

    def _with_settings(self, user: User) -> User:
        user.rate_limiter = self._rate_limiters.get(user.name)
        user.reads_committed = user.name in self._committed_only
        return user

    # -- changes ------------------------------------------------------------------------------------------------------

    def change(self, change: UserChange) -> UserChangeResult:
        """Make a change completely, or not at all."""
        try:
            if "set" in change:
                name, *rules = [each.encode("latin-1") for each in change["set"]]
                user = self.set(name, rules)
                return UserChangeResult(names=change["set"][:1], has_clients=user.was_used)
            if "delete" in change:
                names = self.delete([each.encode("latin-1") for each in change["delete"]])
                return UserChangeResult(names=_texts(names))
            if change.get("load"):
                return UserChangeResult(names=_texts(self.load()))
            self.save()
            return UserChangeResult()
        except AccessError as error:
            return UserChangeResult(str(error))

    def rules_of(self, names: Sequence[str]) -> dict[str, RuleLists | None]:
        """Return the rules of users, for another process to adopt; None for one that does not exist any more."""
        found = {name: self._by_name.get(_bytes(name)) for name in names}
        return {name: None if user is None else _rule_lists(user) for name, user in found.items()}

    @property
    def rules(self) -> dict[str, RuleLists | None]:
        """The rules of all users, for another process to adopt."""
        return self.rules_of(_texts(self._by_name))

    def _put(self, name: bytes, user: User | None) -> User | None:
        """Add a user, or remove one; return the one before."""
        self._sorted, self._loaded = [], None
        before = self._by_name.pop(name, None)
        if user is not None:
            self._by_name[name] = user
        return before

    def adopt(self, rules: Mapping[str, RuleLists | None]) -> None:
        """Apply the outcome of another process's change."""
        self._loaded = None
        for text, rule_lists in rules.items():
            name = _bytes(text)
            if rule_lists is None:
                self._put(name, None)
                continue
            made = User.from_rule_lists(
                name, [[_bytes(rule) for rule in rules] for rules in rule_lists], self._known_commands
            )
            if name in self._by_name:
                self._by_name[name].take_rules_of(made)
            else:
                self._put(name, self._with_settings(made))

    def set(self, name: bytes, rules: Sequence[bytes]) -> User:
        """Apply rules to a user, which is created if it does not exist; return it. AccessError."""
        self._loaded = None
        user = self._by_name.get(name)
        is_new = user is None
        if user is None:
            _check_name(name)
            user = self._with_settings(User(name, self._known_commands))
        try:
            user.apply_all(rules)
        except RuleError as error:
            raise AccessError(str(error)) from None
        if is_new:
            self._put(name, user)
        return user

    def delete(self, names: Sequence[bytes]) -> list[bytes]:
        """Delete users; return the names of those that existed. AccessError for `default`."""
        if DEFAULT_USER in names:
            raise AccessError("The 'default' user cannot be removed")
        return [name for name in names if name in self._by_name and self._put(name, None) is not None]

    # -- the file -----------------------------------------------------------------------------------------------------

    def load(self) -> list[bytes]:
        """Replace all users by those of the file; return the names of the changed, new and removed ones.

        AccessError names the wrong lines, and nothing changes.
        """
        if self.path is None:
            raise AccessError(NO_FILE)
        try:
            with open(self.path, "rb", buffering=0) as file:
                text = file.read(READ_BYTES)
                while len(text) <= FILE_BYTES_MAX and (more := file.read(READ_BYTES)):
                    text += more
        except OSError as error:
            raise AccessError(f"Error loading ACLs, opening file '{self.path}': {error.strerror}") from None
        if len(text) > FILE_BYTES_MAX:
            raise AccessError(f"Error loading ACLs, file '{self.path}' is larger than {FILE_BYTES_MAX >> 20} MiB")
        if text == self._loaded:
            return []
        read, errors = self._read(text)
        if errors:
            raise AccessError("".join(errors) + NOTHING_CHANGED)
        if DEFAULT_USER not in read:
            read[DEFAULT_USER] = User.default(self._known_commands)
        changed = [name for name in self._by_name if name not in read]
        remaining = {name: user for name, user in self._by_name.items() if name in read}
        for name, user in read.items():
            if name not in remaining:
                remaining[name] = self._with_settings(user)
                changed.append(name)
            elif remaining[name].text != user.text:
                remaining[name].take_rules_of(user)
                changed.append(name)
            if not user.is_on:
                log.info("user '%s' of %s is off: nobody can log in as it", _displayed(name), self.path)
        self._by_name, self._sorted, self._loaded = remaining, [], text
        return changed

    def _read(self, text: bytes) -> tuple[dict[bytes, User], list[str]]:
        read: dict[bytes, User] = {}
        errors: list[str] = []
        for number, line in enumerate(text.split(b"\n"), 1):
            words = line.strip(b" \t\r\n").split(b" ")
            if words == [b""]:
                continue
            where = f"{self.path}:{number}"
            if words[0] != b"user" or len(words) < 2:
                errors.append(f"{where} should start with user keyword followed by the username. ")
            elif BLANK.search(words[1]):
                errors.append(f"'{where}: username '{_displayed(words[1])}' contains invalid characters. ")
            elif words[1] in read:
                errors.append(f"WARNING: Duplicate user '{_displayed(words[1])}' found on line {number}. ")
            else:
                user = read[words[1]] = User(words[1], self._known_commands)
                errors += _apply_line(user, words[2:], where)
        return read, errors

    def save(self) -> None:
        """Write all users to the file atomically; AccessError."""
        if self.path is None:
            raise AccessError(NO_FILE)
        lines = [user.line + b"\n" for user in self]
        written = Path(f"{self.path}.tmp-{os.getpid()}")
        try:
            # As Redis, but readable for the owner only: password hashes can be attacked by brute force.
            with open(os.open(written, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileNotFoundError):
                os.chmod(written, Path(self.path).stat().st_mode & 0o777)
            os.replace(written, self.path)
        except OSError as error:
            log.error("the users cannot be written to %s: %s", self.path, error.strerror)
            with suppress(OSError):
                written.unlink()
            raise AccessError(NOT_SAVED) from None


def _check_name(name: bytes) -> None:
    if len(name) > USER_NAME_BYTES_MAX:
        raise AccessError(f"a user's name may have {USER_NAME_BYTES_MAX} bytes; this one has {len(name)}")
    if BLANK.search(name):
        raise AccessError("Usernames can't contain spaces or null characters")


def _apply_line(user: User, words: Sequence[bytes], where: str) -> list[str]:
    """Apply the rules of a line; return errors: one for each unknown name, and the first other one."""
    try:
        rules = merge_selectors(words)
    except RuleError:
        return [f"{where}: Unmatched parenthesis in selector definition."]
    errors: list[str] = []
    has_other = False
    for rule in (each.strip(b"\t\r\n") for each in rules):
        try:
            user.apply(rule)
        except RuleError as error:
            if error.is_unknown:
                errors.append(f"{where}: Error in applying operation '{_displayed(rule)}': {error}. ")
            elif not has_other:
                has_other = True
                errors.append(f"{where}: {error}. ")
    return errors


def _set_password(user: User, password: str | None) -> None:
    user.apply(b"resetpass")
    user.apply(b"nopass" if password is None else b">" + password.encode("utf-8", "surrogateescape"))


def _rule_lists(user: User) -> RuleLists:
    return [[_text(rule) for rule in rules] for rules in user.rule_lists]


def _text(word: bytes) -> str:
    return word.decode("latin-1")


def _texts(words: Iterable[bytes]) -> list[str]:
    return [_text(word) for word in words]


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


def _displayed(word: bytes) -> str:
    return word.decode("utf-8", "surrogateescape")
