"""A reader of a checkpoint's files in a child process, so that it takes no time from the Python of a Spark driver.

`ProcessReader` starts the child at its first read, and again at a read after the child has died. Parent and child send
pickled objects through the child's stdin and stdout:

    to the child    first (location, states); then one _Read at a time
    from the child  records of its log, then one EpochContent with the pause after the read, or an exception; nothing
                    for a request to read ahead

`close` ends the child, and the processes that the child has started (see `partition_share`). They also end when the
child's stdin is closed, because the parent has died.
"""

from __future__ import annotations

import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

from state_backend.attach.attachment import ChangeFiles, StateReader
from state_backend.attach.files_reader import BATCHES_MAX, FilesReader
from state_backend.attach.state_encoder import StateEncoder
from state_backend.checkpoint.checkpoint import Checkpoint
from state_backend.log.change_files import ChangeFileWriter
from state_backend.log.epochs import EpochContent
from state_backend.log.filesystems import open_filesystem
from state_backend.model.errors import CheckpointError, SparkisError
from state_backend.process_memory import retain_free_memory

logger = logging.getLogger("sparkis.attach")

SOURCE = str(Path(__file__).resolve().parents[2])
# If the query and the child both need the processor, the query gets it first: at this niceness, the child gets a tenth
# of one core beside a busy thread (Linux' weights of 110 and 1024). That is what 200,000 changes in 1.5 s need.
NICENESS = 10
AUTOGROUP = Path("/proc/self/autogroup")  # Linux: the niceness of this session among all sessions


@dataclass(frozen=True)
class _Read:
    """A request to read the whole state, or the changes of a batch, into a folder of a log.

    Args:
        is_ahead: The batch is not committed yet.
    """

    root: str
    folder: str
    batch: int
    is_complete: bool = False
    is_ahead: bool = False

    def change_files(self, epoch: int) -> ChangeFileWriter:
        """Return a writer of change files for an epoch."""
        return ChangeFileWriter(open_filesystem(self.root), self.folder, epoch)


class ProcessReader(StateReader):
    """Has a child process read and write; used by one thread, except for `close`.

    Args:
        is_ended: Tells whether the driver's Spark was stopped. The attachment then ends when all batches are read.
    """

    batches_max = BATCHES_MAX

    def __init__(
        self, checkpoint: Checkpoint, states: Sequence[StateEncoder], is_ended: Callable[[], bool] = lambda: False
    ) -> None:
        self.descriptors = tuple(state.descriptor for state in states)
        self.identities = {state.descriptor.name: state.identity for state in states}
        self._location = checkpoint.location
        self._setup = pickle.dumps((checkpoint.location, tuple(states)))
        self._is_ended = is_ended
        self._pause_s = 0.0
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    @property
    def pid(self) -> int | None:
        """The child's process id; a restart changes it. None before the first read."""
        return None if self._child is None else self._child.pid

    def snapshot(self, writer: ChangeFiles, batch: int) -> EpochContent:
        """Write the whole state as of a batch; return the content of its epoch."""
        return self._read(_Read(writer.root, writer.folder, batch, is_complete=True))

    def changes(self, writer: ChangeFiles, first: int, last: int) -> Iterator[tuple[int, EpochContent]]:
        """Write the changes of some batches, and yield them in order."""
        for batch in range(first, last + 1):
            yield batch, self._read(_Read(writer.root, writer.folder, batch))

    def read_ahead(self, writer: ChangeFiles, batch: int) -> None:
        """Let the child begin to read the changes of the next batch before its commit; nothing if no child runs."""
        child = self._child
        if child is not None:
            assert child.stdin is not None
            with suppress(OSError, ValueError):  # the child has ended, or `close` has closed the pipe
                _send(child.stdin, _Read(writer.root, writer.folder, batch, is_ahead=True))

    def pause_s(self, read_s: float) -> float:
        """Return the pause after the last read; the child's reader decides it."""
        return self._pause_s

    def has_ended(self) -> bool:
        """Return whether the reader was closed, or Spark was stopped."""
        return self._is_closed or self._is_ended()

    def close(self) -> None:
        """End the child, also within a read. May be called twice, by any thread."""
        with self._lock:
            self._is_closed = True
            if self._child is not None:
                _end(self._child)

    def _read(self, request: _Read) -> EpochContent:
        child = self._running()
        assert child.stdin is not None and child.stdout is not None
        try:
            _send(child.stdin, request)
            while isinstance(reply := pickle.load(child.stdout), logging.LogRecord):
                _log(reply)
        except (OSError, ValueError, EOFError, pickle.UnpicklingError):  # ValueError: `close` has closed the pipe
            _end(child)
            raise CheckpointError(
                f"{self._location}: the process that reads it has ended with the exit code {child.returncode}"
            ) from None
        if isinstance(reply, Exception):
            raise reply
        content, self._pause_s = reply
        assert isinstance(content, EpochContent)
        return content

    def _running(self) -> subprocess.Popen[bytes]:
        """Return the child; start it if it does not run."""
        with self._lock:
            if self._is_closed:
                raise CheckpointError(f"{self._location}: its reader was closed")
            if self._child is None or self._child.poll() is not None:
                if self._child is not None:
                    code = self._child.returncode
                    logger.warning("the process that reads %s ended with exit code %d; restarted", self._location, code)
                    _end(self._child)
                self._child = self._start()
            return self._child

    def _start(self) -> subprocess.Popen[bytes]:
        paths = [SOURCE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
        child = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
            start_new_session=True,  # Ctrl-C in a shell is for the driver; and the child's own children are one group
        )
        assert child.stdin is not None
        with suppress(OSError):  # the child has ended already: the first read notices it
            child.stdin.write(self._setup)
            child.stdin.flush()
        return child


def _log(record: logging.LogRecord) -> None:
    named = logging.getLogger(record.name)
    if named.isEnabledFor(record.levelno):
        named.handle(record)


def _end(child: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        with suppress(OSError, ValueError):
            pipe.close()


def _send(pipe: IO[bytes], message: object) -> None:
    pipe.write(pickle.dumps(message))
    pipe.flush()


class _ForwardingHandler(logging.Handler):
    """Sends log records to the parent, which has the user's log handlers."""

    def __init__(self, replies: IO[bytes]) -> None:
        super().__init__()
        self._replies = replies

    def emit(self, record: logging.LogRecord) -> None:
        """Send one record."""
        record.msg, record.args, record.exc_info = record.getMessage(), None, None
        _send(self._replies, record)


def main() -> None:
    """Reply to the parent's requests until it closes stdin."""
    retain_free_memory()
    os.nice(NICENESS)
    with suppress(OSError):
        AUTOGROUP.write_text(str(NICENESS))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that no library prints into the replies
    logging.basicConfig(level=logging.INFO, handlers=[_ForwardingHandler(replies)])
    requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(requests,), daemon=True).start()
    reader = _ChildReader(*requests.get())
    while True:
        request: _Read = requests.get()
        if request.is_ahead:
            reader.read_ahead(request)
        else:
            _send(replies, reader.reply(request))


def _receive(requests: queue.SimpleQueue[Any]) -> None:
    """Queue requests; end the process at once, also within a read, when the parent is gone."""
    try:
        while True:
            requests.put(pickle.load(sys.stdin.buffer))
    except (EOFError, pickle.UnpicklingError):
        pass
    except Exception:
        traceback.print_exc()
    finally:
        os.killpg(0, signal.SIGKILL)


class _ChildReader:
    """The reader in the child."""

    def __init__(self, location: str, states: Sequence[StateEncoder]) -> None:
        self._location = location
        self._states = states

    @cached_property
    def _reader(self) -> FilesReader:
        return FilesReader(Checkpoint.at(self._location), self._states)

    def read_ahead(self, request: _Read) -> None:
        """Begin to read a batch before its commit."""
        with suppress(Exception):  # the read after the commit meets the same error, or none
            self._reader.read_ahead(request, request.batch)

    def reply(self, request: _Read) -> object:
        """Read a batch and write its change files; return the message for the parent."""
        began_s = time.monotonic()
        try:
            if request.is_complete:
                content = self._reader.snapshot(request, request.batch)
            else:
                ((_, content),) = self._reader.changes(request, request.batch, request.batch)
        except SparkisError as error:
            return error
        except Exception as error:  # the parent may be unable to unpickle its class
            return CheckpointError(f"{self._location}: {type(error).__name__}: {error}")
        return content, self._reader.pause_s(time.monotonic() - began_s)
