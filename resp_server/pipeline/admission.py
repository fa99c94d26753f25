"""Whether a request may run or be queued, whatever answers it. The checks are in Redis' order:

    unknown command or subcommand -> arity -> NOAUTH -> NOPERM -> MOVED -> READONLY or not served -> LOADING

`check` begins after the arity. CLIENT PAUSE delays a request before all of them.
"""

from __future__ import annotations

from collections.abc import Callable

from resp_server.acl.denial import Denial, denial_text
from resp_server.command.overlay_commands import OverlayCommand
from resp_server.command.policy import SpecialCommand
from resp_server.command.table import Command, CommandTable
from resp_server.pipeline.context import CommandContext, ServerContext
from resp_server.protocol.errors import (
    GenericError,
    LoadingError,
    NoAuthError,
    NoPermError,
    ReplyError,
    cluster_is_static,
    not_for_subscribers,
)
from resp_server.protocol.replies import PausedWrite
from resp_server.protocol.request_parser import Request
from resp_server.session.session import Session

# Raises the error of a request that may neither run nor be queued.
Check = Callable[[CommandContext, Command, Request], None]

# Flags of commands that a monitor may not send; to Redis it is a kind of replica.
NOT_FOR_MONITORS = frozenset(("readonly", "write", "may_replicate"))


def check(context: CommandContext, command: Command, request: Request) -> None:
    """Raise the error of a request that may neither run nor be queued, regardless of its arguments."""
    session, server = context.session, context.server
    cluster, transaction = server.cluster, session.transaction
    if command.facts.needs_auth and not session.is_authenticated:
        raise NoAuthError
    if transaction is not None and "no_multi" in command.facts.flags:
        raise GenericError("Command not allowed inside a transaction")
    if not session.user.is_unrestricted:
        check_user(context, command, request)
    if cluster is not None:
        cluster.check(command.facts, request, session.is_readonly)
    is_missing = command.handler is None
    if is_missing and command.facts.is_write:
        raise command.refusal()
    if session.is_monitor and NOT_FOR_MONITORS.intersection(command.facts.flags):
        raise GenericError("Replica can't interact with the keyspace")
    if session.gets_messages_as_replies and not command.policy.runs_while_subscribed:
        raise not_for_subscribers(command.name)
    if is_missing:
        if cluster is not None and command.facts.group == "cluster":
            raise cluster_is_static(command.name)
        if not command.is_refused_when_run:
            raise command.refusal()
    if server.is_loading:
        needs_state = (
            transaction is not None and transaction.needs_state and command.policy.special is SpecialCommand.EXEC
        )
        if needs_state or "loading" not in command.facts.flags:
            raise LoadingError


def check_user(context: CommandContext, command: Command, request: Request) -> None:
    """Raise NoPermError if the user may not run a request, and record the denial."""
    denied: Denial | None = context.session.user.denial(command, request)
    if denied is not None:
        record_denial(context, command, request, denied)
        raise NoPermError(denial_text(denied.reason, context.session.user.name, command.name))


def check_routed_user(context: CommandContext, routed: OverlayCommand, request: Request) -> None:
    """Raise NoPermError if the user may not run a request that the upstream may answer.

    Commands that the table lacks, such as those of modules, are for unrestricted users.
    """
    if context.session.user.is_unrestricted:
        return
    if routed.command is None:
        name = context.session.user.name.decode("utf-8", "surrogateescape")
        raise NoPermError(f"User {name} has no permissions to run the '{routed.name}' command")
    check_user(context, routed.command, request)


def record_denial(context: CommandContext, command: Command, request: Request, denied: Denial) -> None:
    """Record for ACL LOG which command, key or channel a user may not use."""
    context.record_denial(denied.reason, request[denied.position] if denied.position else command.name.encode())


def may_leave(session: Session, command: Command, request: Request) -> bool:
    """Return whether other processes may get a request of a client; if not, this process replies the error."""
    if not session.is_authenticated or session.user.denial(command, request) is not None:
        return False
    is_refused = session.is_monitor and "readonly" in command.facts.flags
    return not is_refused and not session.gets_messages_as_replies


def may_replicate(table: CommandTable, request: Request) -> bool:
    """Return whether a request is well-formed, and CLIENT PAUSE ... WRITE delays its command."""
    try:
        command = table.find(request)
        command.check_arity(request)
    except ReplyError:
        return False
    return command.facts.is_write or command.policy.may_replicate


def delayed_by_pause(
    server: ServerContext, session: Session, request: Request, may_replicate: Callable[[Request], bool]
) -> PausedWrite | None:
    """Return the wait of a request that CLIENT PAUSE ... WRITE delays; None: the request is answered now.

    As in Redis, these are writes, PUBLISH and scripts, also those that are queued, and an EXEC of such commands.
    """
    remaining_ms = server.observation.pause.remaining_ms()
    if not remaining_ms or not session.is_authenticated:
        return None
    is_exec = session.transaction is not None and server.table.special_of(request) is SpecialCommand.EXEC
    queued = session.transaction.requests if is_exec and session.transaction is not None else ()
    if not any(map(may_replicate, (request, *queued))):
        return None
    return PausedWrite(remaining_ms / 1000)
