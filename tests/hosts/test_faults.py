"""Faults between hosts, one after another, while readers check each reply: none is older, torn, foreign or missing."""

from __future__ import annotations

from tests.hosts.faults import FAULTS, Fault
from tests.hosts.scene import Scene
from tests.hosts.two_keys import (
    LOW,
    PATIENT,
    PATIENT_CLIENT_S,
    epoch_of,
    epochs_in_transaction,
    owner_of,
    wait_for_epoch,
)

__all__ = ["FAULTS"]


def test_no_reply_is_wrong_while_fault_lasts_and_all_keys_are_current_after_it(scene: Scene, fault: Fault) -> None:
    window = scene.run(fault)
    assert not window.wrong, (window.wrong, scene.output())
    assert not scene.upstream.wrongs, scene.upstream.wrongs[:3]
    assert window.reads


def test_reads_in_flight_at_master_that_is_cut_off_are_answered_by_replica(scene: Scene) -> None:
    world = scene.world
    world.start_proxy(2, "--log", world.root, *PATIENT)
    with world.client.network(), world.connect("proxy2", PATIENT_CLIENT_S) as client:
        wait_for_epoch(client, 0)
        for _ in range(3):
            world.network.isolate(world.network.hosts[owner_of(world, LOW)])
            seen = epoch_of(client.get(LOW), LOW)
            assert min(epochs_in_transaction(client)) >= seen
            world.network.heal()
            world.wait_until_complete()
            wait_for_epoch(client, world.record.committed())
