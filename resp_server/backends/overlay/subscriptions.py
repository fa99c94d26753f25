"""SUBSCRIBE, MONITOR and CLIENT TRACKING at a proxy with an upstream: clients get the upstream's part and the states'.

A request is first sent to the upstream, over the client's dedicated connection. Once the upstream has confirmed it, it
takes the general path, as without an upstream: the proxy makes the reply, and the relay subscribes to notifications of
states' keys. The upstream's frames go to the client unchanged, without notifications of keys that states own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

from resp_server.backends.overlay.monitor_lines import MonitorLines
from resp_server.backends.overlay.subscription_order import SubscriptionOrder
from resp_server.backends.overlay.subscription_parts import SubscriptionPart, kind_of, parts_of, subscribes
from resp_server.backends.redis.connection import CONNECT_S_MAX, UpstreamRequest, unreachable
from resp_server.backends.redis.dedicated_connection import DedicatedConnection
from resp_server.backends.redis.link import open_addresses
from resp_server.backends.redis.pool import UpstreamPool
from resp_server.backends.redis.pushed_frames import (
    CONFIRMATIONS,
    INVALIDATE,
    first_word,
    in_protocol,
    invalidated_keys,
    notified_key,
)
from resp_server.backends.redis.tracking import Tracking, TrackingRequest
from resp_server.backends.redis.upstream import Upstream
from resp_server.backends.redis.url import UpstreamUrl
from resp_server.command.policies import policy_of
from resp_server.command.policy import Policy, SpecialCommand, Verb
from resp_server.commands.tracking import TrackingOptions, no_such_client
from resp_server.pipeline.batch import ReplyBatch, next_batch
from resp_server.protocol.errors import GenericError
from resp_server.protocol.request_parser import Request
from resp_server.push.clients import Clients
from resp_server.push.keyspace_notifications import may_match_of_any_database
from resp_server.raw_replies.answers import Answer, Answering, ReplyFuture, all_of, merge_answers, start
from resp_server.raw_replies.raw_reply import RawReply, is_error
from resp_server.raw_replies.reply_splitter import pack
from resp_server.session.session import RESP2, Session
from resp_server.session.subscriptions import SubscriptionKind, Subscriptions
from resp_server.session.tracking import TrackingState

RESET = pack((b"RESET",))
# After the upstream's reply, a client's turn begins what the client has sent meanwhile, and its socket is read again.
# So many turns of the event loop later both have happened, unless the client is paused.
TURNS_UNTIL_BEGUN = 3
LISTENING = (SpecialCommand.MONITOR, SpecialCommand.CLIENT_TRACKING)


def listens(policy: Policy) -> bool:
    """Return whether a command is handled by `OverlaySubscriptions`."""
    return policy.channels is not None or policy.special in LISTENING


class _Confirmation:
    """The upstream's answer to a request, to which the proxy itself replies once it is confirmed.

    Args:
        answering: Waits for the upstream.
        then: Gets whether the request is confirmed.
    """

    def __init__(self, answering: Callable[[], Answering], then: Callable[[bool], None]) -> None:
        self._answering, self._then = answering, then
        self.is_confirmed = False

    async def answer(self) -> Answer:
        """Return the upstream's error, or nothing."""
        try:
            answer = await self._answering()
        except Exception:
            self._then(False)
            raise
        self.is_confirmed = not is_error(answer.reply)
        self._then(self.is_confirmed)
        return Answer(b"") if self.is_confirmed else answer


class OverlaySubscriptions:
    """Sends SUBSCRIBE, MONITOR and CLIENT TRACKING to the upstream.

    Args:
        upstream_of: Returns a client's upstream.
        pool_of: Returns the pool of the node for a client's subscriptions; None: no node is known.
        is_dropped: Tells whether states send the notifications of a key in a database.
        on_invalidation: Called with keys that the upstream has invalidated for a client; None: all keys.
        order: Holds other clients' requests until the upstream has confirmed these.
    """

    def __init__(
        self,
        upstream_of: Callable[[Session], Upstream],
        pool_of: Callable[[Session], UpstreamPool | None],
        url: UpstreamUrl,
        sessions: Mapping[int, Session],
        clients: Clients,
        is_dropped: Callable[[bytes, bytes], bool],
        on_invalidation: Callable[[Session, Sequence[bytes] | None], None],
        order: SubscriptionOrder,
    ) -> None:
        self._url, self._upstream_of = url, upstream_of
        self._on_invalidation = on_invalidation
        self._pool_of, self._sessions, self._clients = pool_of, sessions, clients
        self._is_dropped, self._order = is_dropped, order
        # By client: messages to send after its confirmation. The confirmation is in the client's next batch.
        self._undelivered: dict[int, list[bytes]] = {}
        self._monitor_lines: dict[int, MonitorLines] = {}  # by client that monitors

    def needs_upstream(self, name: str, request: Request, session: Session) -> bool:
        """Return whether the upstream gets a request that subscribes, tracks or monitors, too (see `listens`)."""
        connections = self._dedicated(session)
        special, channels = policy_of(name).special, policy_of(name).channels
        if special is SpecialCommand.CLIENT_TRACKING:
            switch = request[2].upper()
            return switch == b"ON" or (switch == b"OFF" and bool(self._tracking_pools(session)))
        if special is SpecialCommand.MONITOR:
            return session.user.reads_all_keys and not any(each.is_monitor for each in connections)
        if subscribes(name):
            assert channels is not None
            return not self.is_unchanged(channels.verb, kind_of(name), session, request)
        return bool(self._listening(session)) and bool(self._parts(name, request, session))

    def is_unchanged(self, verb: Verb, kind: SubscriptionKind, session: Session, request: Request) -> bool:
        """Return whether the upstream has confirmed all channels of a SUBSCRIBE, or has none for an UNSUBSCRIBE to end.

        False for notifications of keys: the upstream's setting for them is read again.
        """
        subscriptions = session.subscriptions
        if verb is Verb.SUBSCRIBE:
            if subscriptions is None:
                return False
            held = subscriptions.by_kind[kind]
            for name in request[1:]:
                if name not in held or may_match_of_any_database(kind, name):
                    break
            else:
                return True
            return False
        return subscriptions is None and not self._listening(session)

    def is_without_tracking(self, session: Session, request: Request) -> bool:
        """Return whether a CLIENT TRACKING OFF is from a client that the upstream tracks no keys for."""
        return request[2].upper() == b"OFF" and not self._tracking_pools(session)

    def _dedicated(self, session: Session) -> Sequence[DedicatedConnection]:
        connections = [pool.dedicated.get(session.id) for pool in self._upstream_of(session).pools]
        return [each for each in connections if each is not None]

    def _listening(self, session: Session) -> Sequence[DedicatedConnection]:
        connections = [pool.dedicated.by_client.get(session.id) for pool in self._upstream_of(session).pools]
        return [each for each in connections if each is not None and each.is_listening]

    def _parts(self, name: str, request: Request, session: Session) -> Sequence[SubscriptionPart]:
        main = self._pool_of(session)
        if main is None:
            raise unreachable(self._url, "no node is known")
        return parts_of(name, request, session, self._upstream_of(session), main)

    def keep_order(self, name: str, request: Request, session: Session) -> None:
        """Have requests that this proxy receives later wait until the upstream has confirmed this one."""
        special = policy_of(name).special
        if special is SpecialCommand.MONITOR or (
            special is SpecialCommand.CLIENT_TRACKING and not is_broadcasting(request)
        ):
            return  # tracking is about keys that this client reads later
        pool = self._pool_of(session)
        if pool is not None:  # otherwise nothing can be sent
            is_about_requests = special is SpecialCommand.CLIENT_TRACKING or is_about_keys(name, request)
            seconds_max = CONNECT_S_MAX + pool.timeout_s
            self._order.begin(session.id, seconds_max, is_about_requests=is_about_requests)

    async def confirm(
        self, name: str, request: Request, session: Session, batch: ReplyBatch
    ) -> tuple[bool, ReplyBatch]:
        """Send a request to the upstream; return whether it is confirmed, and the next batch. GenericError: not sent.

        If it is confirmed, the proxy's reply is for the next batch; otherwise `batch` has the upstream's error.
        """
        self.keep_order(name, request, session)
        is_tracking = policy_of(name).special is SpecialCommand.CLIENT_TRACKING
        try:
            confirmation = self._track(request, session) if is_tracking else self._subscribe(name, request, session)
        except BaseException:
            self._order.end(session.id)
            raise
        batch.answer(confirmation.answer, session.replies_suppressed)
        batch = await next_batch()
        if is_tracking and confirmation.is_confirmed:
            # Invalidations are for a client that tracks keys, which it does once the general path has run the request.
            self._end_order(session.id)
        if session.id in self._undelivered:
            self._clients.defer(partial(self._release, session.id))
        return confirmation.is_confirmed, batch

    def _subscribe(self, name: str, request: Request, session: Session) -> _Confirmation:
        """Send SUBSCRIBE and the like, or MONITOR, to the nodes that get it."""
        if subscribes(name):
            (session.subscriptions or Subscriptions()).check_limits(kind_of(name), request[1:])
        parts, upstream = self._parts(name, request, session), self._upstream_of(session)
        dedicated = [part.pool.dedicated.open(session.id, session.protocol) for part in parts]
        upstream.on_push = self._push
        if len(parts) > 1 and subscribes(name):
            self._keep_undelivered(session.id)  # a node may send messages before another one has confirmed
        replies = []
        for part, connection in zip(parts, dedicated, strict=True):
            replies.append(ReplyFuture())
            sink = connection.with_attributes(
                replies[-1],
                is_monitor=connection.is_monitor or policy_of(name).special is SpecialCommand.MONITOR,
                is_for_messages=connection.is_for_messages or part.is_main,
                is_at_all_masters=connection.is_at_all_masters or part.is_at_all_masters,
            )
            sent = UpstreamRequest(pack(part.request), sink, 0, is_read=False)
            sent.confirmations = part.confirmations
            connection.send_request(sent, session.protocol)
        cut = partial(self._clients.cut, session.id, "it is subscribed at some nodes of the upstream only")
        return _Confirmation(partial(_at_all, replies, upstream.checked, cut), partial(self._confirmed, session.id))

    def begin_module_subscription(self, name: str, session: Session) -> None:
        """Prepare the client's connection for a module's command that may subscribe it; GenericError in RESP2.

        In RESP2 the frames of a module cannot be distinguished from replies.
        """
        if session.protocol == RESP2:
            raise GenericError(f"command '{name}' of a module, which may subscribe, needs RESP3; send HELLO 3 first")
        upstream, pool = self._upstream_of(session), self._pool_of(session)
        if pool is None:
            raise unreachable(self._url, "no node is known")
        upstream.on_push = self._push
        connection = pool.dedicated.open(session.id, session.protocol)
        connection.has_module_subscription = connection.is_for_messages = True

    def end(self, session: Session, batch: ReplyBatch) -> bool:
        """Have the upstream end the subscriptions of a client that sends RESET; False: it has none there any more.

        The upstream does not notice the end of a connection at once, and would count its subscriptions until then.
        """
        connections = self._listening(session)
        if not connections:
            return False
        replies = []
        for each in connections:
            replies.append(ReplyFuture())
            each.add(UpstreamRequest(RESET, replies[-1], 0, is_read=False))
        batch.answer(partial(_at_the_end_of, replies), is_suppressed=True)
        return True

    def _track(self, request: Request, session: Session) -> _Confirmation:
        """Send CLIENT TRACKING to all nodes that have keys, or where it is on; the reply is the first error, or OK."""
        is_on, options = request[2].upper() == b"ON", TrackingOptions.of(request[3:])
        if options.redirect and options.redirect not in self._sessions:
            raise no_such_client()
        if is_on:  # the upstream does not get what the proxy refuses
            options.check(session.tracking_state or TrackingState())
        tracking = Tracking(request, bool(options.redirect)) if is_on else Tracking(request[:3])
        upstream = self._upstream_of(session)
        upstream.on_moved, upstream.on_push = self._forget_cached, self._push
        tracking_pools = self._tracking_pools(session)  # of a node, too, that only a MOVED has named so far
        pools = list(dict.fromkeys([*upstream.masters, *tracking_pools])) if is_on else tracking_pools
        if not pools:
            raise unreachable(self._url, "no node is known")
        for pool in pools:  # before a request is sent: an error means that no node tracks keys
            pool.dedicated.open(session.id, session.protocol)
            if tracking.is_redirected:
                pool.dedicated.open_listener(session.id)

        def confirm(is_confirmed: bool) -> None:
            if is_on and is_confirmed and session.id in self._sessions:
                upstream.begin_tracking(session.id, tracking)  # `confirmed` ends the wait of later requests
            else:
                self._end_order(session.id)

        if not is_on:
            upstream.end_tracking(session.id)
        replies = []
        for pool in pools:
            replies.append(ReplyFuture())
            TrackingRequest(tracking, session.protocol, replies[-1], 0).send(pool.dedicated, session.id)
        return _Confirmation(partial(merge_answers, replies, lambda found: found[0], upstream.defer), confirm)

    def _tracking_pools(self, session: Session) -> Sequence[UpstreamPool]:
        connections = [(pool, pool.dedicated.get(session.id)) for pool in self._upstream_of(session).pools]
        return [pool for pool, each in connections if each is not None and each.is_tracking]

    def _forget_cached(self, clients: Collection[int]) -> None:
        """Invalidate all keys of clients: the nodes that had some of these keys no longer report their changes."""
        for session in filter(None, map(self._sessions.get, clients)):
            self._on_invalidation(session, None)

    def leave(self, session: Session) -> None:
        """Forget a client that has left, or sent RESET."""
        self._undelivered.pop(session.id, None)
        self._monitor_lines.pop(session.id, None)
        self._order.leave(session.id)

    def _confirmed(self, client: int, is_confirmed: bool) -> None:
        self._keep_undelivered(client)
        self._end_order(client)

    def _end_order(self, client: int) -> None:
        """Let later requests of others go on once the subscriber's own next requests have begun."""
        self._end_order_in(TURNS_UNTIL_BEGUN, client, self._order.confirm(client))

    def _end_order_in(self, turns: int, client: int, reply: int) -> None:
        if turns:
            self._clients.defer(partial(self._end_order_in, turns - 1, client, reply))
        else:
            self._order.end_after(client, reply)

    def _keep_undelivered(self, client: int) -> None:
        """Hold a client's messages back until its confirmation is sent."""
        if client in self._sessions:
            self._undelivered.setdefault(client, [])

    def _release(self, client: int) -> None:
        for text in self._undelivered.pop(client, ()):
            self._clients.push(client, text)

    def _lines_of(self, client: int) -> MonitorLines:
        found = self._monitor_lines.get(client)
        if found is None:
            found = self._monitor_lines[client] = MonitorLines(open_addresses.__contains__)
        return found

    def _push(self, client: int, frame: RawReply) -> None:
        session = self._sessions.get(client)
        if session is None:
            return
        if isinstance(frame, bytes) and frame[:1] == b"+":
            if not self._lines_of(client).hides(frame):
                self._send(client, frame)
            return
        word = first_word(frame)
        if word in CONFIRMATIONS:  # not of a request: the slot of a shard's channel has moved
            self._clients.cut(client, "the slot of a channel has moved to another node of the upstream")
            return
        if word == INVALIDATE:
            self._on_invalidation(session, invalidated_keys(frame))
            return
        notified = notified_key(frame)
        if notified is not None and self._is_dropped(*notified):
            return
        first, *others = [frame] if isinstance(frame, bytes) else frame.texts
        self._send(client, in_protocol(first, session.protocol), *others)

    def _send(self, client: int, *texts: bytes) -> None:
        if client in self._undelivered:
            self._undelivered[client] += texts
            return
        for text in texts:
            self._clients.push(client, text)


def is_about_keys(name: str, request: Request) -> bool:
    """Return whether a request may subscribe to notifications of keys."""
    return any(may_match_of_any_database(kind_of(name), each) for each in request[1:]) if subscribes(name) else False


def is_broadcasting(request: Request) -> bool:
    """Return whether a CLIENT TRACKING asks for invalidations of keys that the client has not read."""
    return b"BCAST" in map(bytes.upper, request[3:])


async def _at_all(
    replies: Sequence[ReplyFuture], checked: Callable[[RawReply], RawReply], cut: Callable[[], None]
) -> Answer:
    """Return the first error of the nodes that get a request, or nothing.

    Args:
        checked: As `Upstream.checked`.
        cut: Disconnects the client if it is subscribed at some of the nodes only.
    """
    try:
        answers = await all_of([start(_checked(reply, checked)) for reply in replies])
    except Exception:
        if len(replies) > 1:
            cut()
        raise
    errors = [answer for answer in answers if is_error(answer.reply)]
    if 0 < len(errors) < len(replies):
        cut()
    return errors[0] if errors else Answer(b"")


async def _checked(reply: ReplyFuture, checked: Callable[[RawReply], RawReply]) -> Answer:
    return Answer(checked((await reply).reply))


async def _at_the_end_of(replies: Sequence[ReplyFuture]) -> Answer:
    """Wait for the replies to RESET. An error is ignored: the connection is closed anyway."""
    await all_of(replies)
    return Answer(b"")
