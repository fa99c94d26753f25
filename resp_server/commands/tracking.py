"""Client-side caching: CLIENT TRACKING, CACHING, GETREDIR and TRACKINGINFO, with the errors of Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from resp_server.command.handler import command, integer, worker_query
from resp_server.pipeline.context import GATHER_S_MAX, CommandContext, ServerContext
from resp_server.protocol.errors import GenericError, client_text, syntax_error
from resp_server.protocol.replies import OK, Pending, Reply, ReplySet
from resp_server.push.invalidation_relay import RELAY, relayed
from resp_server.push.tracking_table import PREFIX_BYTES_MAX, PREFIX_OVERHEAD_BYTES
from resp_server.session.tracking import TrackingState

DISABLE_FIRST = "before disabling tracking for this client, and then re-enabling it with a different mode."


@dataclass
class TrackingOptions:
    """The options of CLIENT TRACKING."""

    redirect: int = 0
    prefixes: list[bytes] = field(default_factory=list)
    flags: set[bytes] = field(default_factory=set)

    @classmethod
    def of(cls, arguments: Sequence[bytes]) -> TrackingOptions:
        """Parse the options; the existence of the client to redirect to is not checked here."""
        options = cls()
        remaining = iter(arguments)
        for argument in remaining:
            option = argument.upper()
            if option in (b"BCAST", b"OPTIN", b"OPTOUT", b"NOLOOP"):
                options.flags.add(option)
            elif option in (b"REDIRECT", b"PREFIX"):
                options._read_option(option, remaining)
            else:
                raise syntax_error()
        return options

    def _read_option(self, option: bytes, remaining: Iterator[bytes]) -> None:
        argument = next(remaining, None)
        if argument is None:
            raise syntax_error()
        if option == b"PREFIX":
            self.prefixes.append(argument)
            return
        if self.redirect:
            raise GenericError("A client can only redirect to a single other client")
        self.redirect = integer(argument)
        if not self.redirect:
            raise no_such_client()

    def check(self, current: TrackingState) -> None:
        """Raise GenericError for options that contradict each other, or the client's current mode."""
        is_bcast, is_optin, is_optout = (flag in self.flags for flag in (b"BCAST", b"OPTIN", b"OPTOUT"))
        if self.prefixes and not is_bcast:
            raise GenericError("PREFIX option requires BCAST mode to be enabled")
        if current.is_on and current.is_bcast != is_bcast:
            raise GenericError(f"You can't switch BCAST mode on/off {DISABLE_FIRST}")
        if is_bcast and (is_optin or is_optout):
            raise GenericError("OPTIN and OPTOUT are not compatible with BCAST")
        if is_optin and is_optout:
            raise GenericError("You can't specify both OPTIN mode and OPTOUT mode")
        if (is_optin and current.is_optout) or (is_optout and current.is_optin):
            raise GenericError(f"You can't switch OPTIN/OPTOUT mode {DISABLE_FIRST}")
        self._check_prefixes(current)

    def _check_prefixes(self, current: TrackingState) -> None:
        # Checked first: below, every prefix is compared with every other, which is too slow for thousands of them.
        if sum(len(each) + PREFIX_OVERHEAD_BYTES for each in current.prefixes.union(self.prefixes)) > PREFIX_BYTES_MAX:
            raise GenericError(
                f"the prefixes of one client may take {PREFIX_BYTES_MAX} bytes; use fewer, or shorter ones"
            )
        existing = sorted(current.prefixes)
        for index, prefix in enumerate(self.prefixes):
            for others, which in ((existing, "an existing"), (self.prefixes[index + 1 :], "another provided")):
                for other in others:
                    if prefix.startswith(other) or other.startswith(prefix):
                        raise GenericError(
                            f"Prefix '{client_text(prefix)}' overlaps with {which} prefix '{client_text(other)}'. "
                            "Prefixes for a single client must not overlap."
                        )

    def apply(self, server: ServerContext, client: TrackingState) -> None:
        """Begin to track with these options."""
        client.redirect = self.redirect
        client.is_bcast, client.is_optin, client.is_optout, client.is_noloop = (
            flag in self.flags for flag in (b"BCAST", b"OPTIN", b"OPTOUT", b"NOLOOP")
        )
        client.is_broken = False
        prefixes = (self.prefixes or [b""]) if client.is_bcast else ()
        server.tracking.begin(client, prefixes)


NO_OPTIONS = TrackingOptions()


@command("client|tracking")
def client_tracking(context: CommandContext, switch: bytes, *arguments: bytes) -> Reply:
    """Controls server-assisted client-side caching for the connection."""
    options = TrackingOptions.of(arguments) if arguments else NO_OPTIONS
    server, session = context.server, context.session
    is_remote = options.redirect and options.redirect not in server.sessions

    def apply() -> Reply:
        if switch.upper() == b"OFF":
            if session.tracking_state is not None:
                server.tracking.end(session.tracking_state)
                session.set_tracking(None)
        elif switch.upper() == b"ON":
            state = session.tracking_state or TrackingState(session.id, lambda: session.user)
            options.check(state)
            options.apply(server, state)
            session.set_tracking(state)
            if state.is_bcast and not is_remote:  # a reply of `gather` cannot wait again
                return once_followed(server)
        else:
            raise syntax_error()
        return OK

    if not is_remote:
        return apply()

    def merge(responses: Sequence[bool]) -> Reply:
        if not any(responses):
            raise no_such_client()
        return apply()

    return server.gather(is_client_here, options.redirect, merge)


def once_followed(server: ServerContext) -> Reply:
    """Return OK once all changes reach this process. A client with BCAST is told of keys that it has not read, too.

    The keys that clients read need no wait: a server gets the read after the request to report changes.
    """
    reply = Pending(GATHER_S_MAX, lambda: OK)
    server.tracking.when_followed(lambda: reply.resolve(lambda: OK))
    return OK if reply.is_resolved else reply


def no_such_client() -> GenericError:
    """Return the error for a REDIRECT to a client that is not connected."""
    return GenericError("The client ID you want redirect to does not exist")


@worker_query("is a client here")
def is_client_here(server: ServerContext, session_id: int) -> bool:
    """Return whether this process has a client."""
    return session_id in server.sessions


@worker_query(RELAY)
def push_invalidations(server: ServerContext, argument: Mapping[str, Any]) -> bool:
    """Send another process's invalidations to a client of this process; False if the client is not here."""
    return relayed(server.sessions, server.clients, argument)


@command("client|caching")
def client_caching(context: CommandContext, mode: bytes) -> Reply:
    """Instructs the server whether to track the keys in the next request."""
    state = context.session.tracking_state
    if state is None:
        raise GenericError(
            "CLIENT CACHING can be called only when the client is in tracking mode with OPTIN or OPTOUT mode enabled"
        )
    argument = mode.upper()
    if argument not in (b"YES", b"NO"):
        raise syntax_error()
    required_mode = "OPTIN" if argument == b"YES" else "OPTOUT"
    if not (state.is_optin if argument == b"YES" else state.is_optout):
        raise GenericError(
            f"CLIENT CACHING {argument.decode()} is only valid when tracking is enabled in {required_mode} mode."
        )
    state.is_caching_set = True
    return OK


@command("client|getredir")
def client_getredir(context: CommandContext) -> int:
    """Returns the client ID to which the connection's tracking notifications are redirected."""
    state = context.session.tracking_state
    return -1 if state is None else state.redirect


@command("client|trackinginfo")
def client_trackinginfo(context: CommandContext) -> Reply:
    """Returns information about server-assisted client-side caching for the connection."""
    state = context.session.tracking_state
    if state is None:
        return {b"flags": ReplySet([b"off"]), b"redirect": -1, b"prefixes": []}
    flags = [
        (b"on", True),
        (b"bcast", state.is_bcast),
        (b"optin", state.is_optin),
        (b"caching-yes", state.is_optin and state.is_caching_set),
        (b"optout", state.is_optout),
        (b"caching-no", state.is_optout and state.is_caching_set),
        (b"noloop", state.is_noloop),
        (b"broken_redirect", state.is_broken),
    ]
    return {
        b"flags": ReplySet(flag for flag, is_set in flags if is_set),
        b"redirect": state.redirect,
        b"prefixes": sorted(state.prefixes),
    }
