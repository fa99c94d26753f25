"""The processes that read histories: they are reused, replaced, and ended."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from compat.waiting import eventually_async
from resp_server.pipeline import histories
from resp_server.pipeline.histories import Histories, HistoryRequest
from resp_server.protocol.errors import GenericError
from resp_server.protocol.replies import Frames
from state_backend import log_lines
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op
from tests.server.histories import readers_of


@pytest.fixture
def history_request(tmp_path: Path) -> HistoryRequest:
    with LogWriter(tmp_path, "job", [StateDescriptor("temp", key="k", value="v")], "query") as writer:
        writer.publish([Change("temp", Op.PUT, b"job:temp:\xff", value=b"1")], clock_ms=1_700_000_000_000)
        generation = writer.generation
    return HistoryRequest(str(tmp_path), "job", generation, 0, b"job:temp:\xff", 10, 2)


def on_a_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    """Run a test on an event loop of its own."""

    @wraps(test)
    def run(*arguments: object, **named: object) -> None:
        asyncio.run(test(*arguments, **named))

    return run


def children() -> set[int]:
    return readers_of(os.getpid())


async def read(reader: Histories, history_request: HistoryRequest) -> Any:
    """Return the reply, or raise its error."""
    pending, done = reader.read(history_request), asyncio.Event()
    pending.when_resolved(done.set)
    await done.wait()
    return pending.make()


@on_a_loop
async def test_process_is_reused_and_replaced_when_it_has_ended(history_request: HistoryRequest) -> None:
    made = Histories()
    first = await read(made, history_request)
    assert isinstance(first, Frames) and first.frames.startswith(b"*1\r\n*10\r\n$5\r\nepoch\r\n:0\r\n")
    (process,) = children()
    assert await read(made, history_request) == first
    with pytest.raises(GenericError, match="its state was replaced"):
        await read(made, replace(history_request, generation="another"))
    with pytest.raises(GenericError, match="epoch 7 is not committed"):
        await read(made, replace(history_request, epoch=7))
    with pytest.raises(GenericError, match="internal error"):
        await read(made, replace(history_request, count="ten"))  # type: ignore[arg-type]
    assert children() == {process}
    os.kill(process, signal.SIGKILL)
    with suppress(GenericError):  # it may not be known yet that the process has ended
        await read(made, history_request)
    assert await read(made, history_request) == first
    assert children() and process not in children()
    await made.stop()
    assert not children()


@on_a_loop
async def test_slow_history_is_error_and_ends_its_process(
    history_request: HistoryRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(histories, "HISTORY_S_MAX", 0.01)  # shorter than the start of a process
    with pytest.raises(GenericError, match="the history was not read in 0 s; a smaller COUNT"):
        await read(Histories(), history_request)
    await eventually_async(lambda: not children())


@on_a_loop
async def test_process_that_ends_while_it_reads_is_error(history_request: HistoryRequest) -> None:
    made = Histories()
    await read(made, history_request)
    (process,) = children()
    os.kill(process, signal.SIGSTOP)
    reading = asyncio.create_task(read(made, history_request))
    await asyncio.sleep(0)
    os.kill(process, signal.SIGKILL)
    with pytest.raises(GenericError, match="the process that reads histories ended"):
        await reading
    await made.stop()


@on_a_loop
async def test_running_process_logs_as_server_does(
    history_request: HistoryRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    made = Histories()
    await read(made, history_request)
    (process,) = children()
    log_lines.set_up("info", "json")
    faulty = replace(history_request, count="many")  # type: ignore[arg-type]
    with pytest.raises(GenericError, match="internal error"):
        await read(made, faulty)
    assert children() == {process}
    await made.stop()
    assert json.loads(capfd.readouterr().err)["pid"] == process


@on_a_loop
async def test_idle_process_ends(history_request: HistoryRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "IDLE_S", 0.01)
    made = Histories()
    await read(made, history_request)
    await eventually_async(lambda: not children())
    await read(made, history_request)
    await made.stop()
