"""No turn of a server's loop is long for any requests of one client: every command at its largest, known attacks."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from compat.conformance.wire import request
from resp_server.command.table import Command
from resp_server.session.subscriptions import NAME_BYTES_MAX
from resp_server.settings.server import ServerConfig
from tests.server.conftest import Peer, Running
from tests.server.turns_measured import (
    ATTACKS,
    TURN_MS_MAX,
    WAIT_TURNS_MAX,
    Attacked,
    MeasuredLoop,
    check_beside_many_subscriptions,
    check_command,
    filled_store,
    keyspace_of,
    served,
)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    store = filled_store(tmp_path_factory.mktemp("turns") / "store")
    running = Running(ServerConfig(port=0, hosts=("127.0.0.1",)), keyspace_of(store), MeasuredLoop)
    gc.collect()
    gc.freeze()  # as a server does when it has started: what the tests hold is no work of it
    yield Attacked(running, running.server.port)
    gc.unfreeze()
    running.stop()
    store.close()


@pytest.mark.parametrize("command", served(), ids=lambda command: command.name)
def test_every_command_equals_redis_at_its_largest(attacked: Attacked, command: Command) -> None:
    check_command(attacked, command)


@pytest.mark.parametrize("attack", ATTACKS)
def test_known_attacks_cause_no_long_turn(attacked: Attacked, attack: str) -> None:
    assert attacked.longest_ms(ATTACKS[attack]()) < TURN_MS_MAX
    assert attacked.bystander.longest_wait <= WAIT_TURNS_MAX


def test_subscription_beside_those_of_many_clients_causes_no_long_turn(attacked: Attacked) -> None:
    check_beside_many_subscriptions(attacked)


def test_message_reaches_many_patterns_and_many_clients(attacked: Attacked) -> None:
    channel = b"k" * NAME_BYTES_MAX
    subscribed = [Peer(attacked.port) for _ in range(300)]
    for number, each in enumerate(subscribed):
        each.send(request(b"PSUBSCRIBE", b"*k%d*" % number, b"*" + b"k?" * 505 + b"*", b"*" + b"?k" * 300 + b"*k*"))
    for each in subscribed:
        each.read_until(b":3\r\n")
    longest_ms = attacked.longest_ms(b"".join(request(b"PUBLISH", channel, b"message %d" % at) for at in range(5)))
    for each in subscribed:
        received = each.read_until(b"message 4\r\n")
        while received.count(b"message 4") < 2:
            received += each.read_until(b"message 4\r\n")
        assert [received.count(b"message %d" % at) for at in range(5)] == [2] * 5
        assert received.index(b"message 0") < received.index(b"message 1") < received.index(b"message 4")
        each.socket.close()
    assert longest_ms < TURN_MS_MAX
    assert attacked.bystander.longest_wait <= WAIT_TURNS_MAX


def test_turns_of_loop_are_measured(attacked: Attacked) -> None:
    """What the tests above assert would be seen."""
    attacked.loop.take_longest_ms()
    attacked.thread.call(lambda: sum(number * number for number in range(20_000_000)))
    assert attacked.loop.take_longest_ms() > TURN_MS_MAX
