"""Slots that get another server, and servers that were lost."""

from __future__ import annotations

from resp_server.cluster.topology import Topology
from resp_server.registry.moved_slots import MovedSlots

A, B = "a" * 40, "b" * 40


def topology(version: int, slots_of_a: str, slots_of_b: str) -> Topology:
    rows = [(A, 7400, slots_of_a), (B, 7401, slots_of_b)]
    nodes = [{"id": name, "host": "10.0.0.1", "port": port, "slots": slots} for name, port, slots in rows]
    return Topology.of_json({"version": version, "nodes": nodes})


def test_first_topology_moves_nothing() -> None:
    moves = MovedSlots()
    moves.count(None, topology(1, "0-16383", ""), {A, B})
    assert (moves.slots, moves.failovers) == (0, 0)


def test_slots_that_move_between_living_servers_are_no_failover() -> None:
    moves = MovedSlots()
    moves.count(topology(1, "0-16383", ""), topology(2, "0-8191", "8192-16383"), {A, B})
    moves.count(topology(2, "0-8191", "8192-16383"), topology(3, "0-8192", "8193-16383"), {A, B})
    assert (moves.slots, moves.failovers) == (8193, 0)


def test_lost_server_of_many_slots_is_one_failover() -> None:
    moves = MovedSlots()
    moves.count(topology(1, "0-8191", "8192-16383"), topology(2, "", "0-16383"), {B})
    assert (moves.slots, moves.failovers) == (8192, 1)
