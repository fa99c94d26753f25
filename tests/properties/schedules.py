"""Runs several actors on one change log, one file operation at a time, in an order that a seed determines.

An actor is ordinary code (a writer, a sweep, a reader) in a thread of its own; it runs until its next operation on the
filesystem, where the scheduler chooses the next actor. So an actor can be stopped at any operation, for a moment or for
ever, which is what SIGSTOP, a long pause of a virtual machine, or a lost network does to a process.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import BinaryIO
from zlib import crc32

import pyarrow as pa

from state_backend.log.filesystems import Filesystem

# How many operations an actor makes before another one's turn may come.
BURSTS = (1, 1, 2, 3, 8, 20, 60, 400)


class Ended(BaseException):
    """The schedule has ended within an operation of this actor."""


class Actor:
    """Code that stops before each operation until its turn."""

    def __init__(self, scheduler: Scheduler, name: str, run: Callable[[], None]) -> None:
        self.name = name
        self.is_done = False
        self.error: BaseException | None = None
        self._scheduler = scheduler
        self._turn = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._is_over = False
        self._left = 0
        self._thread = threading.Thread(target=self._run, args=(run,), name=name, daemon=True)
        self._thread.start()

    def _run(self, run: Callable[[], None]) -> None:
        try:
            self._wait()
            run()
        except Ended:
            pass
        except BaseException as error:  # to be raised by the test
            self.error = error
        self.is_done = True
        self._back.release()

    def _wait(self) -> None:
        self._turn.acquire()
        if self._is_over:
            raise Ended

    def stop_here(self) -> None:
        """Give the turn back once it is used up; called by the actor before each operation."""
        if self._is_over:
            raise Ended
        self._left -= 1
        if self._left < 0:
            self._back.release()
            self._wait()

    def go_on(self, operations: int) -> None:
        """Let the actor make up to so many operations; called by the scheduler."""
        self._left = operations
        self._scheduler.running = self
        self._turn.release()
        self._back.acquire()
        self._scheduler.running = None
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """End the actor at its present operation."""
        self._is_over = True
        if not self.is_done:
            self._turn.release()
        self._thread.join()


class Scheduler:
    """Chooses the actor of each turn."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.running: Actor | None = None
        self.actors: list[Actor] = []
        self.operations = 0

    def add(self, name: str, run: Callable[[], None]) -> None:
        """Add an actor; it begins when its turn comes."""
        self.actors.append(Actor(self, name, run))

    def step(self) -> None:
        """Stop the running actor; does nothing for an operation of the test itself."""
        self.operations += 1
        if self.running is not None and threading.current_thread() is self.running._thread:
            self.running.stop_here()

    def run(self, turns: int, between: Callable[[], None]) -> None:
        """Give turns of random lengths; some actors starve for long, or for ever. Call `between` after each turn."""
        frozen: set[str] = set()
        for _ in range(turns):
            ready = [actor for actor in self.actors if not actor.is_done]
            if not ready:
                return
            awake = [actor for actor in ready if actor.name not in frozen]
            if not awake or self.random.random() < 0.08:
                frozen = set(self.random.sample([actor.name for actor in ready], self.random.randrange(len(ready))))
                continue
            actor = self.random.choice(awake)
            actor.go_on(self.random.choice(BURSTS))
            between()

    def end(self) -> None:
        """End all actors."""
        for actor in self.actors:
            actor.end()


class ScheduledFilesystem(Filesystem):
    """Files in memory. Each operation is one step of an actor; a listing or the removal of a folder is several."""

    root = "memory"

    def __init__(self, scheduler: Scheduler) -> None:
        self.files: dict[str, bytes] = {}
        self.on_create: Callable[[str, bytes], None] = lambda path, content: None
        self._scheduler = scheduler

    def _step(self) -> None:
        self._scheduler.step()

    def read(self, path: str) -> bytes | None:
        self._step()
        return self.files.get(path)

    def open_input(self, path: str) -> pa.Buffer | None:
        content = self.read(path)
        return None if content is None else pa.py_buffer(content)

    def create(self, path: str, content: bytes) -> bool:
        self._step()
        if path in self.files:
            return False
        self.files[path] = content
        self.on_create(path, content)
        return True

    @contextmanager
    def open_new(self, path: str) -> Iterator[BinaryIO]:
        self._step()
        file = io.BytesIO()
        yield file
        self._step()
        self.files[path] = file.getvalue()

    def replace(self, path: str, content: bytes, *, is_durable: bool = True) -> None:
        self._step()
        self.files[path] = content

    def names(self, path: str) -> list[str]:
        """List in two steps, as a folder may change while it is read."""
        prefix = f"{path}/" if path else ""
        found: set[str] = set()
        for half in (0, 1):
            self._step()
            names = {each[len(prefix) :].partition("/")[0] for each in self.files if each.startswith(prefix)}
            found |= {name for name in names if crc32(name.encode()) % 2 == half}
        return self._scheduler.random.sample(sorted(found), len(found))

    def folders(self, path: str) -> list[str]:
        raise NotImplementedError("logs do not use it")

    def size(self, path: str) -> int | None:
        self._step()
        content = self.files.get(path)
        return None if content is None else len(content)

    def modified_ns(self, path: str) -> int | None:
        raise NotImplementedError("logs do not use it")

    def copy(self, source: str, target: str) -> bool:
        self._step()
        content = self.files.get(source)
        if content is not None:
            self.files.setdefault(target, content)
        return content is not None

    def make_folder(self, path: str) -> None:
        """Folders do not exist here, as in an object store."""

    def remove(self, path: str) -> None:
        inside = [each for each in self.files if each == path or each.startswith(f"{path}/")]
        self._scheduler.random.shuffle(inside)
        for each in inside:
            self._step()
            self.files.pop(each, None)
