"""What a registry knows of its own log."""

from __future__ import annotations

from pathlib import Path

from resp_server.registry.own_log import OwnLog
from state_backend.log.filesystems import open_filesystem
from state_backend.log.identity import IDENTITY_FILE, ensure_identity


def test_identity_is_kept_while_folder_is_empty_until_another_log_is_there(tmp_path: Path) -> None:
    filesystem = open_filesystem(tmp_path)
    own = OwnLog(filesystem)
    own.read(())
    assert own.identity is None
    first = ensure_identity(filesystem)
    own.read(())
    assert own.identity == first
    (tmp_path / IDENTITY_FILE).unlink()
    own.read(())
    assert own.identity == first
    second = ensure_identity(filesystem)
    own.read(())
    assert own.identity == second != first
