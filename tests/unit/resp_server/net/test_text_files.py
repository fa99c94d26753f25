from __future__ import annotations

import os
import signal
from pathlib import Path
from threading import Thread
from time import monotonic

import pytest

from resp_server.net import text_files
from resp_server.net.text_files import read_text


def test_text_of_pipe_is_complete_after_interruptions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "INTERRUPT_S", 0.001)
    os.mkfifo(pipe := tmp_path / "pipe")

    def write() -> None:
        ends_s = monotonic() + 0.05  # the reader waits and is interrupted meanwhile
        with pipe.open("w") as file:
            while monotonic() < ends_s:
                print("secret", file=file, flush=True)

    writer = Thread(target=write)
    writer.start()
    assert set(read_text(str(pipe)).splitlines()) == {"secret"}
    writer.join()
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
