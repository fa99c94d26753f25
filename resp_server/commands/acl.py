"""ACL: users and their permissions.

The server is read-only for data, but users may be changed here. They are in memory; ACL SAVE writes them to the ACL
file. A change applies at once to all connections of all processes that serve the port.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from resp_server.acl.denial import Denial, denial_text
from resp_server.acl.log import AclLogEntry, merge_entries
from resp_server.acl.selector import CATEGORIES, Selector
from resp_server.acl.user import User
from resp_server.acl.users import UserChange, UserChangeResult
from resp_server.command.handler import OneOrMore, command, integer, worker_query
from resp_server.command.table import Command
from resp_server.pipeline.context import CommandContext, ServerContext, ok
from resp_server.protocol.errors import GenericError, ReplyError, client_text
from resp_server.protocol.replies import OK, Frames, Reply, ReplySet, encode
from resp_server.session.session import RESP2

GENPASS_BITS = 256
GENPASS_BITS_MAX = 4096
LOG_ENTRIES = 10
CATEGORY_BYTES_MAX = 128
# The reply to ACL CAT; the same in both versions of the protocol.
CATEGORY_NAMES = Frames(encode([each.encode() for each in CATEGORIES], RESP2))


@command("acl|whoami")
def acl_whoami(context: CommandContext) -> bytes:
    """Returns the authenticated username of the current connection."""
    return context.session.user.name


@command("acl|users")
def acl_users(context: CommandContext) -> Reply:
    """Lists all ACL users."""
    return [user.name for user in context.server.users]


@command("acl|list")
def acl_list(context: CommandContext) -> Reply:
    """Dumps the effective rules in ACL file format."""
    return [user.line for user in context.server.users]


@command("acl|getuser")
def acl_getuser(context: CommandContext, name: bytes) -> Reply:
    """Lists the ACL rules of a user."""
    user = context.server.users.get(name)
    if user is None:
        return None
    root, *others = user.selectors
    return {
        b"flags": ReplySet(user.flags),
        b"passwords": list(user.passwords),
        **_selector(root),
        b"selectors": [_selector(each) for each in others],
    }


def _selector(selector: Selector) -> dict[bytes, Reply]:
    return {b"commands": selector.commands_text, b"keys": selector.keys_text, b"channels": selector.channels_text}


@command("acl|cat")
def acl_cat(context: CommandContext, category: bytes | None = None) -> Reply:
    """Lists the ACL categories, or the commands inside a category."""
    if category is None:
        return CATEGORY_NAMES
    category_name = category.decode("latin-1").lower()
    if category_name not in CATEGORIES:
        raise GenericError(f"Unknown category '{client_text(category[:CATEGORY_BYTES_MAX])}'")
    commands = context.server.table.with_subcommands()
    return [each.name.encode() for each in commands if f"@{category_name}" in each.facts.acl_categories]


@command("acl|setuser")
def acl_setuser(context: CommandContext, name: bytes, *rules: bytes) -> Reply:
    """Creates and modifies an ACL user and its rules."""
    return _change(context, {"set": [each.decode("latin-1") for each in (name, *rules)]})


@command("acl|deluser")
def acl_deluser(context: CommandContext, *names: OneOrMore) -> Reply:
    """Deletes ACL users, and terminates their connections."""
    change: UserChange = {"delete": [each.decode("latin-1") for each in names]}
    return context.server.change_users(change, context.session, _number_changed)


@command("acl|load")
def acl_load(context: CommandContext) -> Reply:
    """Reloads the rules from the configured ACL file."""
    return _change(context, {"load": True})


@command("acl|save")
def acl_save(context: CommandContext) -> Reply:
    """Saves the effective ACL rules in the configured ACL file."""
    return _change(context, {"save": True})


def _change(context: CommandContext, change: UserChange) -> Reply:
    return context.server.change_users(change, context.session, _changed)


def _changed(outcome: UserChangeResult) -> Reply:
    _checked(outcome)
    return OK


def _number_changed(outcome: UserChangeResult) -> int:
    return len(_checked(outcome).names)


def _checked(outcome: UserChangeResult) -> UserChangeResult:
    if outcome.error is not None:
        raise GenericError(outcome.error)
    return outcome


@command("acl|genpass")
def acl_genpass(context: CommandContext, bits: int = GENPASS_BITS) -> bytes:
    """Generates a pseudorandom, secure password that can be used to identify ACL users."""
    if not 0 < bits <= GENPASS_BITS_MAX:
        raise GenericError(
            f"ACL GENPASS argument must be the number of bits for the output password, a positive number up to "
            f"{GENPASS_BITS_MAX}"
        )
    characters = (bits + 3) // 4
    return secrets.token_hex((characters + 1) // 2)[:characters].encode()


@command("acl|dryrun")
def acl_dryrun(context: CommandContext, name: bytes, *arguments: OneOrMore) -> Reply:
    """Simulates the execution of a command by a user, without executing the command."""
    user = context.server.users.get(name)
    if user is None:
        raise GenericError(f"User '{client_text(name)}' not found")
    target = _command_of(context, arguments)
    target.check_arity(arguments)
    denial = user.denial(target, arguments)
    return OK if denial is None else _denial_text(user, target, arguments, denial)


def _command_of(context: CommandContext, arguments: Sequence[bytes]) -> Command:
    try:
        return context.server.table.find(arguments)
    except ReplyError:
        raise GenericError(f"Command '{client_text(arguments[0])}' not found") from None


def _denial_text(user: User, target: Command, arguments: Sequence[bytes], denial: Denial) -> bytes:
    text = denial_text(denial.reason, user.name, target.name, arguments[denial.position])
    return text.encode("utf-8", "surrogateescape")


@command("acl|log")
def acl_log(context: CommandContext, argument: bytes | None = None) -> Reply:
    """Lists recent security events generated due to ACL rules."""
    if argument is not None and argument.lower() == b"reset":
        return context.server.gather(reset_denials, None, ok)
    count = LOG_ENTRIES if argument is None else max(0, integer(argument))
    if context.server.workers is None and not context.server.users.denials.entries:
        return []
    now_ms = context.server.clock()
    return context.server.gather(
        denials, None, lambda responses: [_log_row(entry, now_ms) for entry in merge_entries(responses)[:count]]
    )


@worker_query("denials")
def denials(server: ServerContext, nothing: None) -> Sequence[dict[str, Any]]:
    """Return this process's entries of ACL LOG."""
    return server.users.denials.to_json()


@worker_query("reset denials")
def reset_denials(server: ServerContext, nothing: None) -> None:
    """Clear this process's entries of ACL LOG."""
    server.users.denials.reset()


def _log_row(entry: AclLogEntry, now_ms: int) -> Reply:
    return {
        b"count": entry.count,
        b"reason": entry.reason.encode(),
        b"context": entry.context.encode(),
        b"object": entry.object.encode("latin-1"),
        b"username": entry.user.encode("latin-1"),
        b"age-seconds": (now_ms - entry.updated_ms) / 1000,
        b"client-info": entry.client.encode("utf-8", "surrogateescape"),
        b"entry-id": entry.entry_id,
        b"timestamp-created": entry.created_ms,
        b"timestamp-last-updated": entry.updated_ms,
    }


@command("acl|help")
def acl_help(context: CommandContext) -> Reply:
    """Returns helpful text about the different subcommands."""
    return context.server.table.help("acl")
