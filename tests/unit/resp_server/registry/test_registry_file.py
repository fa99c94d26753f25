"""A registry's record is what a registry wrote, or an error that names it."""

from __future__ import annotations

import json

import pytest

from resp_server.cluster.single_node import single_node_topology
from resp_server.registry.registry_file import RegistryFile
from state_backend.model.errors import LogCorruptError

RECORD = RegistryFile(3, "10.0.0.1:7377", 1, single_node_topology("10.0.0.2:7400"))


def test_flipped_bit_of_record_is_error_or_changes_nothing() -> None:
    stored = RECORD.to_bytes()
    refused = 0
    for bit in range(len(stored) * 8):
        flipped = bytearray(stored)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            assert RegistryFile.parse(bytes(flipped), "registry.json") == RECORD, f"bit {bit} is silent"
        except LogCorruptError as error:
            assert str(error).startswith("registry.json is not a registry's record (")
            refused += 1
    assert refused > 0.9 * len(stored) * 8


def test_record_of_version_without_checksums_is_read() -> None:
    content = json.loads(RECORD.to_bytes())
    del content["checksum"]
    assert RegistryFile.parse(json.dumps(content).encode(), "registry.json") == RECORD
    with pytest.raises(LogCorruptError, match=r"does not match its checksum\); remove it: a registry writes a new one"):
        RegistryFile.parse(json.dumps(content | {"checksum": 7}).encode(), "registry.json")
