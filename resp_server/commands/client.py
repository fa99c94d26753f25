"""CLIENT: connections, their names and properties. Client-side caching is in `tracking`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, zip_longest
from operator import itemgetter
from typing import Annotated, Any

from resp_server.command.handler import INTEGER_MAX, OneOrMore, command, integer, integer_at_least, worker_query
from resp_server.commands.connection import client_name, library_text
from resp_server.pipeline.context import CommandContext, ServerContext, ok
from resp_server.protocol.errors import GenericError, ReplyError, client_text, syntax_error
from resp_server.protocol.replies import OK, Reply, Verbatim
from resp_server.session.session import ReplyMode, Session
from resp_server.session.subscriptions import SubscriptionKind
from resp_server.session.tracking import TrackingState

NOT_TRACKED = TrackingState()
SIZES = (
    "sub={0} psub={1} ssub={2} multi={3} watch={4} qbuf=0 qbuf-free=0 argv-mem=0 multi-mem={5} rbs=0 rbp=0 obl=0 oll=0 "
    "omem={6} tot-mem={6}"
)
NO_SIZES = SIZES.format(0, 0, 0, -1, 0, 0, 0)
REPLY_MODES = {b"ON": ReplyMode.ON, b"OFF": ReplyMode.OFF, b"SKIP": ReplyMode.SKIP_NEXT}
# Clients' texts of CLIENT LIST: many have the same names, and none is long.
text_of = lru_cache(1024)(client_text)

TIMEOUT = b"TIMEOUT"
PAUSES_WRITES = {b"WRITE": True, b"ALL": False}
CLIENT_TYPES = (b"normal", b"master", b"replica", b"slave", b"pubsub")


def on_or_off(argument: bytes) -> bool:
    """Parse ON or OFF."""
    if argument.upper() not in (b"ON", b"OFF"):
        raise syntax_error()
    return argument.upper() == b"ON"


Switch = Annotated[bool, on_or_off]


@command("client|id")
def client_id(context: CommandContext) -> int:
    """Returns the unique client ID of the connection."""
    return context.session.id


@command("client|getname")
def client_getname(context: CommandContext) -> bytes | None:
    """Returns the name of the connection."""
    return context.session.name or None


@command("client|setname")
def client_setname(context: CommandContext, name: Annotated[bytes, client_name]) -> Reply:
    """Sets the connection name."""
    context.session.name = name
    return OK


@command("client|setinfo")
def client_setinfo(context: CommandContext, attribute: bytes, value: bytes) -> Reply:
    """Sets information specific to the client or connection."""
    name = attribute.lower()
    if name == b"lib-name":
        context.session.lib_name = library_text(attribute, value)
    elif name == b"lib-ver":
        context.session.lib_ver = library_text(attribute, value)
    else:
        raise GenericError(f"Unrecognized option '{client_text(attribute)}'")
    return OK


@command("client|no-evict")
def client_no_evict(context: CommandContext, is_on: Switch) -> Reply:
    """Sets the client eviction mode of the connection."""
    context.session.is_no_evict = is_on
    return OK


@command("client|no-touch")
def client_no_touch(context: CommandContext, is_on: Switch) -> Reply:
    """Controls whether commands sent by the client affect the LRU/LFU of accessed keys."""
    context.session.is_no_touch = is_on
    return OK


@command("client|reply")
def client_reply(context: CommandContext, mode: bytes) -> Reply:
    """Instructs the server whether to reply to commands."""
    reply_mode, session = REPLY_MODES.get(mode.upper()), context.session
    if reply_mode is None:
        raise syntax_error()
    # SKIP has no effect after OFF.
    if reply_mode is not ReplyMode.SKIP_NEXT or session.reply_mode is not ReplyMode.OFF:
        session.set_reply_mode(reply_mode)
    return OK


@command("client|info")
def client_info(context: CommandContext) -> Reply:
    """Returns information about the connection."""
    return _text([client_line(context.server, context.session, context.now_ms)])


@command("client|list")
def client_list(context: CommandContext, *options: bytes) -> Reply:
    """Lists open connections."""
    server, now_ms = context.server, context.now_ms
    if not options and server.workers is None:
        sessions = server.sessions
        return _text([client_line(server, sessions[each], now_ms) for each in sorted(sessions)])
    option = options[0].upper() if options else None
    ids: list[int] | None = None
    kind = ""
    if option == b"TYPE" and len(options) == 2:
        kind = _client_type(options[1]).decode()
    elif option == b"ID" and len(options) > 1:
        ids = [_session_id(argument) for argument in options[1:]]
    elif options:
        raise syntax_error()

    def merge(responses: Sequence[list[tuple[int, str]]]) -> Reply:
        rows = list(chain.from_iterable(responses))
        if ids is None:
            return _text([line for _, line in sorted(rows, key=itemgetter(0))])
        lines = dict(rows)
        return _text([lines[each] for each in ids if each in lines])

    unique_ids = None if ids is None else list(dict.fromkeys(ids))
    return server.gather(client_lines, {"ids": unique_ids, "kind": kind}, merge)


def _text(lines: Sequence[str]) -> Reply:
    return Verbatim("".join(lines).encode("utf-8", "surrogateescape"))


@worker_query("client lines")
def client_lines(server: ServerContext, filters: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return (id, line of CLIENT LIST) of this process's clients, by ids (None: all) and kind (empty: any)."""
    sessions, ids, kind = server.sessions, filters["ids"], filters["kind"]
    chosen = sessions.values() if ids is None else [sessions[each] for each in ids if each in sessions]
    now_ms = server.clock()
    return [(each.id, client_line(server, each, now_ms)) for each in chosen if not kind or kind == kind_of(each)]


def kind_of(session: Session) -> str:
    """Return a client's kind as CLIENT LIST TYPE names it."""
    return "normal" if session.subscriptions is None else "pubsub"


def _client_type(argument: bytes) -> bytes:
    if argument.lower() not in CLIENT_TYPES:
        raise GenericError(f"Unknown client type '{client_text(argument)}'")
    return argument.lower()


def _session_id(argument: bytes) -> int:
    try:
        return integer(argument)
    except ReplyError:
        raise GenericError("Invalid client ID") from None


def client_line(server: ServerContext, session: Session, now_ms: int) -> str:
    """Return a connection's line of CLIENT LIST. Fields about Redis' own buffers are 0."""
    state = session.tracking_state or NOT_TRACKED
    return (
        f"id={session.id} addr={session.address} laddr={session.local_address} fd=-1 "
        f"name={text_of(session.name) if session.name else ''} age={(now_ms - session.created_ms) // 1000} "
        f"idle={(now_ms - session.active_ms) // 1000} flags={_flags(session, state)} db={session.db} "
        f"{_sizes(session, server.clients.output_bytes(session.id))} events=r cmd={session.last_command or 'NULL'} "
        f"user={text_of(session.user.name)} redir={state.redirect if state.is_on else -1} "
        f"resp={session.protocol} lib-name={text_of(session.lib_name) if session.lib_name else ''} "
        f"lib-ver={text_of(session.lib_ver) if session.lib_ver else ''} "
        f"tot-net-in={session.input_bytes} tot-net-out={session.output_bytes} tot-cmds={session.calls}\n"
    )


def _sizes(session: Session, output_bytes: int) -> str:
    """Return the fields with the sizes of a connection's buffers; most connections have none."""
    transaction, subscribed = session.transaction, session.subscriptions
    if transaction is None and subscribed is None and not session.watched and not output_bytes:
        return NO_SIZES
    queued, queued_bytes = (-1, 0) if transaction is None else (len(transaction.requests), transaction.size_bytes)
    channels = patterns = shard_channels = 0
    if subscribed is not None:
        channels, patterns, shard_channels = (len(subscribed.by_kind[kind]) for kind in SubscriptionKind)
    return SIZES.format(channels, patterns, shard_channels, queued, len(session.watched), queued_bytes, output_bytes)


def _flags(session: Session, state: TrackingState) -> str:
    """Return the letters of a connection's flags."""
    if session.can_use_fast_path and not (session.is_readonly or session.is_no_evict or session.is_no_touch):
        return "N"  # it has none of the others, either
    flags = "O" * session.is_monitor + "b" * session.is_paused + "P" * (session.subscriptions is not None)
    flags += "x" * (session.transaction is not None)
    if state is not NOT_TRACKED:
        flags += "t" * state.is_on + "R" * state.is_broken + "B" * state.is_bcast
    return flags + "r" * session.is_readonly + "e" * session.is_no_evict + "T" * session.is_no_touch or "N"


@command("client|kill")
def client_kill(context: CommandContext, *arguments: OneOrMore) -> Reply:
    """Terminates open connections."""
    server, own_id = context.server, context.session.id
    if len(arguments) == 2 and server.workers is None and arguments[0].lower() == b"id":  # as most clients do
        session_id = _kill_id(arguments[1])
        is_other = session_id != own_id and session_id in server.sessions
        if is_other:
            server.clients.cut(session_id)
        return int(is_other)
    is_old_form = len(arguments) == 1
    # With the old form, a client may kill itself.
    filters = {"skipme": False, "addr": client_text(arguments[0])} if is_old_form else _kill_options(server, arguments)

    def merge(responses: Sequence[list[int]]) -> Reply:
        killed = responses[0] if len(responses) == 1 else [each for response in responses for each in response]
        if own_id in killed:
            context.session.close()  # the caller still gets the reply
        if not is_old_form:
            return len(killed)
        if not killed:
            raise GenericError("No such client")
        return OK

    filters["caller"] = own_id
    return server.gather(kill_clients, filters, merge)


def _kill_options(server: ServerContext, arguments: Sequence[bytes]) -> dict[str, Any]:
    """Parse the filters; a client is closed if it passes all. Of a repeated filter, the last one counts."""
    filters: dict[str, Any] = {"skipme": True}
    for option, argument in zip_longest(arguments[::2], arguments[1::2]):
        found = KILL_FILTERS.get(option.lower())
        if argument is None or found is None:
            raise syntax_error()
        name, convert = found
        if name == "user" and server.users.get(argument) is None:
            raise GenericError(f"No such user '{client_text(argument)}'")
        filters[name] = convert(argument)
    return filters


def _kill_id(argument: bytes) -> int:
    return integer_at_least(argument, 1, "client-id should be greater than 0")


def _kill_age_s(argument: bytes) -> int:
    try:
        number = integer(argument)
    except ReplyError:
        raise GenericError("maxage is not an integer or out of range") from None
    if number < 1:
        raise GenericError("maxage should be greater than 0")
    return number


def _kill_skipme(argument: bytes) -> bool:
    if argument.upper() not in (b"YES", b"NO"):
        raise syntax_error()
    return argument.upper() == b"YES"


# By the option's name as bytes: the name, and the function that converts the argument.
KILL_FILTERS: Mapping[bytes, tuple[str, Callable[[bytes], Any]]] = {
    b"id": ("id", _kill_id),
    b"maxage": ("maxage", _kill_age_s),
    b"type": ("type", lambda argument: _client_type(argument).decode()),
    b"addr": ("addr", client_text),
    b"laddr": ("laddr", client_text),
    b"user": ("user", client_text),
    b"skipme": ("skipme", _kill_skipme),
}


@worker_query("kill clients")
def kill_clients(server: ServerContext, filters: Mapping[str, Any]) -> list[int]:
    """Close the connections that pass all filters, and return their ids; the caller's own is listed but not closed."""
    chosen: Iterable[Session] = server.sessions.values()
    if "id" in filters:
        session = server.sessions.get(filters["id"])
        chosen = () if session is None else (session,)
    # A filter that is not given is not looked at: there may be many clients.
    born_ms = server.clock() - filters["maxage"] * 1000 if "maxage" in filters else INTEGER_MAX
    killed = [each.id for each in chosen if _passes_filters(each, filters, born_ms)]
    for session_id in killed:
        if session_id != filters["caller"]:
            server.clients.cut(session_id)
    return killed


def _passes_filters(session: Session, filters: Mapping[str, Any], born_ms: int) -> bool:
    """Return whether a client passes all filters but that by id. born_ms: the latest time at which it connected."""
    return (
        filters.get("addr", session.address) == session.address
        and filters.get("laddr", session.local_address) == session.local_address
        and ("type" not in filters or filters["type"] == kind_of(session))
        and ("user" not in filters or filters["user"] == text_of(session.user.name))
        and session.created_ms <= born_ms
        and not (filters["skipme"] and session.id == filters["caller"])
    )


@command("client|pause")
def client_pause(context: CommandContext, timeout: bytes, mode: bytes = b"ALL") -> Reply:
    """Suspends commands processing."""
    is_for_writes = PAUSES_WRITES.get(mode.upper())
    if is_for_writes is None:
        raise GenericError("CLIENT PAUSE mode must be WRITE or ALL")
    try:
        timeout_ms = integer(timeout)
    except ReplyError:
        raise GenericError("timeout is not an integer or out of range") from None
    if timeout_ms < 0:
        raise GenericError("timeout is negative")
    until_ms = min(context.now_ms + timeout_ms, INTEGER_MAX)
    return context.server.gather(pause_clients, {"until_ms": until_ms, "is_for_writes": is_for_writes}, ok)


@worker_query("pause clients")
def pause_clients(server: ServerContext, pause: Mapping[str, Any]) -> None:
    """Pause all clients of this process, or their writes only, until a time."""
    server.observation.pause.begin(pause["until_ms"], is_for_writes=pause["is_for_writes"])


@command("client|unpause")
def client_unpause(context: CommandContext) -> Reply:
    """Resumes processing commands from paused clients."""
    return context.server.gather(unpause_clients, None, ok)


@worker_query("unpause clients")
def unpause_clients(server: ServerContext, nothing: None) -> None:
    """Resume all clients of this process."""
    server.observation.pause.end()


@command("client|unblock")
def client_unblock(context: CommandContext, client: bytes, reason: bytes = TIMEOUT) -> Reply:
    """Unblocks a client blocked by a blocking command from a different connection."""
    if reason is not TIMEOUT and reason.upper() not in (TIMEOUT, b"ERROR"):
        raise GenericError("CLIENT UNBLOCK reason should be TIMEOUT or ERROR")
    integer(client)  # checked after the reason, as in Redis
    return 0  # no command blocks


@command("client|help")
def client_help(context: CommandContext) -> Reply:
    """Returns helpful text about the different subcommands."""
    return context.server.table.help("client")
