"""Exceptions of the compiled core are logged and counted, and cost no client its reply."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compat.conformance.wire import request
from resp_server import native
from state_backend.lmdb.store import LmdbStore
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.builders import apply_epoch

pytestmark = pytest.mark.compiled

STATES = [StateDescriptor("z", key="k", member="m", score="s")]


def test_requests_before_partial_one_are_answered_when_core_raises(
    serve: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raising(number: float) -> bytes:
        raise RuntimeError("nobody expected this")

    store = LmdbStore(tmp_path, "g1")
    changes = [Change("z", Op.PUT, b"job:z:a", b"m", b"1e30")]
    apply_epoch(store, STATES, changes, 0)
    running = serve(store, STATES)
    monkeypatch.setattr(native.encoding, "double_text", raising)
    peer = running.connect()
    whole, half = request(b"ZSCORE", b"job:z:a", b"m"), request(b"PING", b"there")
    peer.send(whole + half[:-4])
    assert peer.read(11) == b"$5\r\n1e+30\r\n"
    peer.send(half[-4:])
    assert peer.read(11) == b"$5\r\nthere\r\n"
    assert running.server.context.stats.internal_errors == 1
    store.close()
