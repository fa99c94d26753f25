"""An exception in any function of a server or a proxy costs one client something, and all others nothing.

A round of requests of all kinds, from ten clients in one turn, is watched to learn which functions it calls. Then it
is played again for each of them, and one call of that function raises. No client is left without an answer. At most one
has an error where an answer was, or is cut, behind answers that are right; all others have all of theirs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import CodeType
from typing import Any

import pytest

from compat.conformance.wire import NotAReplyError, reply_at, request
from compat.waiting import WAIT_S_MAX
from state_backend.model.records import Change, Op, runs_of
from state_backend.store.store import EpochChanges
from tests.server.conftest import Peer
from tests.server.faults import KEYS, LONG_LIST, InjectedError, Scene

EVERYTHING = b">2\r\n$10\r\ninvalidate\r\n_\r\n"
END = b"$3\r\nend\r\n"
ANY_REPLY = rb".*"
OK = rb"\+OK\r\n"


def bulk(value: bytes) -> bytes:
    return re.escape(b"$%d\r\n%b\r\n" % (len(value), value))


def array(*items: bytes) -> bytes:
    return rb"\*%d\r\n" % len(items) + b"".join(items)


VALUES = [bulk(b"v%d" % number) for number in range(40)]
LIST = array(*(bulk(b"item %d" % number) for number in range(3000)))
PONG, QUEUED = rb"\+PONG\r\n", rb"\+QUEUED\r\n"

Row = tuple[Sequence[Any], bytes]

# What each client asks, and what it is answered.
ROUND: dict[str, list[Row]] = {
    "one": [(["GET", KEYS[1]], VALUES[1])],
    "another": [(["GET", KEYS[2]], VALUES[2])],
    "some": [(["GET", KEYS[at]], VALUES[at]) for at in (5, 6, 20, 21)],
    "many": [(["MGET", KEYS[1], KEYS[2], KEYS[30]], array(VALUES[1], VALUES[2], VALUES[30]))],
    "mixed": [
        (["GET", KEYS[8]], VALUES[8]),
        (["EXISTS", KEYS[1], KEYS[2], KEYS[3]], rb":3\r\n"),
        (["STRLEN", KEYS[1]], rb":2\r\n"),
        (["MGET", KEYS[7], KEYS[9]], array(VALUES[7], VALUES[9])),
        (["GET", KEYS[9]], VALUES[9]),
    ],
    "about all": [
        (["DBSIZE"], rb":\d+\r\n"),
        (["KEYS", "job:n:3"], array(bulk(KEYS[3]))),
        (["SCAN", "0", "MATCH", "nothing"], ANY_REPLY),
        (["RANDOMKEY"], ANY_REPLY),
        (["STATE", "JOBS"], ANY_REPLY),
        (["INFO"], ANY_REPLY),
        (["CLIENT", "LIST"], ANY_REPLY),
        (["COMMAND", "COUNT"], ANY_REPLY),
        (["LRANGE", LONG_LIST, "0", "-1"], LIST),
        (["OBJECT", "NOTHING"], rb"-ERR unknown subcommand[^\r]*\r\n"),
    ],
    "at once": [
        (["WATCH", KEYS[1], KEYS[2]], OK),
        (["MULTI"], OK),
        (["GET", KEYS[1]], QUEUED),
        (["MGET", KEYS[2], KEYS[3]], QUEUED),
        (["PING"], QUEUED),
        (["PUBLISH", "nobody's", "x"], QUEUED),
        (["LRANGE", LONG_LIST, "0", "-1"], QUEUED),
        (["EXEC"], array(VALUES[1], array(VALUES[2], VALUES[3]), PONG, rb":0\r\n", LIST)),
        (["GET", KEYS[4]], VALUES[4]),
    ],
    "publisher": [(["PUBLISH", "channel", "message"], rb":1\r\n"), (["GET", KEYS[11]], VALUES[11])],
}


class Players:
    """The clients of one round at one port."""

    def __init__(self, scene: Scene, port: int) -> None:
        self._scene = scene
        self.peers = {name: scene.connect(port) for name in ROUND}
        self.subscriber, self.tracker = scene.connect(port), scene.connect(port)
        self.subscriber.expect_reply(
            request("SUBSCRIBE", "channel"), b"*3\r\n$9\r\nsubscribe\r\n$7\r\nchannel\r\n:1\r\n"
        )
        self.tracker.send(request("HELLO", "3") + request("CLIENT", "TRACKING", "ON") + request("ECHO", "end"))
        self.tracker.read_until(END)
        for each in (*self.peers.values(), self.tracker, self.subscriber):
            each.socket.settimeout(WAIT_S_MAX)

    def play(self) -> dict[str, str]:
        """Have all ask in one turn, and a key change; return what was wrong with whom."""
        with self._scene.held_up():
            for name, rows in ROUND.items():
                self.peers[name].send(b"".join(request(*words) for words, _ in rows))
            self.tracker.send(request("GET", KEYS[39]))
        found = {}
        for name, rows in ROUND.items():
            self.peers[name].send(request("ECHO", "end"))
            found[name] = what_is_wrong(
                read(self.peers[name], len(rows) + 1), [*(each for _, each in rows), bulk(b"end")]
            )
        if not found["publisher"]:  # else there may be no message
            received = read(self.subscriber, 1)
            found["subscriber"] = what_is_wrong(received, [array(bulk(b"message"), bulk(b"channel"), bulk(b"message"))])
        received = read(self.tracker, 1)
        while received == [EVERYTHING]:  # the way to a server was lost
            received = read(self.tracker, 1)
        found["tracker"] = what_is_wrong(received, [rb"\$\d+\r\n[^\r]*\r\n"])
        change(self._scene)
        if not found["tracker"]:
            received, told_key = read(self.tracker, 1), array(bulk(KEYS[39]))
            found["tracker"] = what_is_wrong(received, [rb">2\r\n\$10\r\ninvalidate\r\n(?:_\r\n|" + told_key + rb")"])
        return {name: wrong for name, wrong in found.items() if wrong}


def change(scene: Scene) -> None:
    """Publish an epoch that changes one key."""
    scene.epoch += 1
    changes = [Change("n", Op.PUT, KEYS[39], value=b"%d" % scene.epoch)]
    runs = list(runs_of(changes, ["n", "l", "s"]))
    scene.call(lambda: scene.store.apply(EpochChanges(scene.epoch, 1, scene.epoch, runs), scene.states))


# What came behind what was read.
unread: dict[Peer, bytes] = {}


def read(peer: Peer, count: int) -> list[bytes]:
    """Read so many replies, or as many as come before the end of the connection."""
    data, replies, at = unread.pop(peer, b""), list[bytes](), 0
    while len(replies) < count:
        try:
            reply, after = reply_at(data, at)
        except (NotAReplyError, IndexError, ValueError):
            try:
                some = peer.socket.recv(1 << 20)
            except ConnectionError:
                some = b""
            if not some:
                return replies
            data += some
            continue
        replies.append(reply.raw)
        at = after
    unread[peer] = data[at:]
    return replies


def what_is_wrong(replies: Sequence[bytes], expected: Sequence[bytes]) -> str:
    """Say what was answered with an error, or not at all; nothing else may stand where an answer should."""
    wrong: list[str] = []
    for reply, each in zip(replies, expected, strict=False):
        if not re.fullmatch(each, reply, re.DOTALL) or (each == ANY_REPLY and reply[:1] == b"-"):
            is_error = b"-ERR internal error " in reply or reply.startswith(
                (b"-EXECABORT", b"-ERR EXEC without", b"-ERR")
            )
            assert is_error or wrong, (
                reply[:200],
                each[:200],
            )  # behind an error within a transaction there may be others
            wrong.append(reply[:100].decode())
    if len(replies) < len(expected):
        wrong.append(f"{len(replies)} of {len(expected)} answers")
    return "; ".join(wrong)


def name_of(code: CodeType) -> str:
    return f"{code.co_filename.rpartition('/resp_server/')[2]}:{code.co_qualname}"


# What guards others: the event loop, or whoever brings answers, calls these, and they call what is guarded. Nobody
# guards these, so they do nothing else.
FUNCTIONS_THAT_CATCH = {
    "client/write_queue.py:WriteQueue.flush",
    "serving/epoch_notifier.py:EpochNotifier._notify",
    "serving/epoch_notifier.py:EpochNotifier._schedule",
    "client/turn_scheduler.py:TurnScheduler._step",
    "client/round.py:Round.answer",
    "pipeline/context.py:ServerContext.attempt",
    "raw_replies/answers.py:_Run.resume",
    "raw_replies/answers.py:CallbackWait._end",
    "raw_replies/answers.py:Replies._end",
    "pipeline/batch.py:ReplyBatch.put",
    "pipeline/batched.py:_call_when_resolved.<locals>.end",
    "raw_replies/pipelined_connection.py:PipelinedConnection.flush",
}


def functions_called(scene: Scene, of: str) -> dict[CodeType, int]:
    """Return the functions that a round calls, and how often."""
    called: dict[CodeType, int] = {}

    def count(code: CodeType) -> None:
        called[code] = called.get(code, 0) + 1

    for watch in (None, count):
        players = Players(scene, scene.port(of))
        scene.watch_calls(watch)
        assert players.play() == {}
        scene.watch_calls(None)
        scene.let_all_go()
    return called


# All functions take minutes; some of them are looked at each time.
@pytest.mark.parametrize("of", ["alone", "proxy"])
@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.slow)])
def test_exception_of_any_function_costs_one_client_one_error(of: str, step: int) -> None:
    scene = Scene()
    called = functions_called(scene, of)
    bad: dict[tuple[str, int], object] = {}
    for code, times in list(called.items())[::step]:
        if name_of(code) in FUNCTIONS_THAT_CATCH:
            continue
        for call in {1, times}:
            wrong = play_with(scene, of, code, call)
            if len(wrong) > 1:
                bad[name_of(code), call] = wrong
                scene.stop()
                scene = Scene()
    scene.stop()
    for key, value in bad.items():
        print(key, value)
    assert not bad
    assert len(called) > 300


def play_with(scene: Scene, of: str, code: CodeType, call: int) -> dict[str, str]:
    """Play a round in which a call of a function raises; return what was wrong with whom."""
    left = [call]

    def raise_at(called: CodeType) -> None:
        if called is code:
            left[0] -= 1
            if not left[0]:
                raise InjectedError

    players = Players(scene, scene.port(of))
    scene.watch_calls(raise_at)
    try:
        wrong = players.play()
    except (TimeoutError, AssertionError) as error:
        wrong = {"all": repr(error), "": ""}
    scene.watch_calls(None)
    try:
        scene.let_all_go()
    except TimeoutError:
        wrong |= {"": "not let go", "rest": ""}
    return wrong
