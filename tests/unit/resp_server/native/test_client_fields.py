"""Requests that the garbage collector does not track."""

from __future__ import annotations

import gc
import weakref

import pytest

from resp_server import native
from resp_server.protocol.request_parser import LongRequest

pytestmark = pytest.mark.compiled


def test_untracked_request_grows_as_before_and_is_freed_with_its_last_reference() -> None:
    request = LongRequest([b"MGET"], 0)
    assert gc.is_tracked(request)
    native.client_fields.untrack(request)
    native.client_fields.untrack(request)
    request += [b"k%d" % at for at in range(10_000)]
    request.decision = object()
    gc.collect()
    assert not gc.is_tracked(request) and len(request) == 10_001
    freed = weakref.ref(request)
    del request
    assert freed() is None
