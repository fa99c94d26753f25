"""The record of a driver's server on this machine, by which the next driver of the same log finds the server.

    <cache>/sparkis/driver-<hash of the machine's name and the log's root>/
        server.json   address and token of the control port, process, options; from the start to the orderly end
        port          the last port for clients; the next server takes it again
        server.log    the server's messages since its start
        store/        the server's store; removed when the server ends for good
        lock          held by the one driver that starts or takes over a server

Other users cannot read the folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from resp_server.net.client import Client
from resp_server.net.tls import TlsFiles, client_context

CONTROL_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class ServerFile:
    """A running server of a log.

    Args:
        start: The start time of its process, which tells it from a later process with the same id.
        options: The options with which it was started; a driver takes over only a server with its own options.
    """

    log: str
    pid: int
    start: str | None
    port: int
    control_port: int
    token: str
    options: str
    tls: TlsFiles | None = None

    @classmethod
    def read(cls, folder: Path) -> ServerFile | None:
        """Read the record in a server's folder; None if there is none."""
        try:
            fields = json.loads((folder / "server.json").read_text())
            tls = fields.pop("tls")
            return cls(**fields, tls=None if tls is None else TlsFiles(**tls))
        except (OSError, ValueError, TypeError, KeyError):
            return None

    def write(self, folder: Path) -> None:
        """Write the record, token included, into a server's folder."""
        unfinished = folder / "server.new"
        unfinished.write_text(json.dumps(asdict(self)))
        unfinished.replace(folder / "server.json")
        (folder / "port").write_text(str(self.port))

    def connect(self) -> Client:
        """Connect to the server's control port; ClientError if there is no such server any more."""
        context = None if self.tls is None else client_context(self.tls)
        return Client("127.0.0.1", self.control_port, password=self.token, timeout_s=CONTROL_TIMEOUT_S, tls=context)


def folder_of(root: str) -> Path:
    """Return the folder of a log's server on this machine, made if it is missing."""
    here = f"{socket.gethostname()}\0{root}"  # machines may share a home folder
    named = "driver-" + hashlib.blake2b(here.encode(), digest_size=8).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparkis"
    temporary = Path(tempfile.gettempdir()) / f"sparkis-{os.getuid()}"
    for parent in (cache, temporary):
        with suppress(OSError):
            parent.mkdir(parents=True, exist_ok=True)
            if parent == temporary and parent.stat().st_uid != os.getuid():
                continue  # another user made it, and could replace its files
            (parent / named).mkdir(mode=0o700, exist_ok=True)
            (parent / named).chmod(0o700)
            return parent / named
    raise OSError(f"neither {cache} nor {temporary} can be written; set XDG_CACHE_HOME to a folder that can")


def remove_server_file(folder: str | None) -> None:
    """Remove the record of a server that ends in order; None: the server has none."""
    if folder is not None:
        Path(folder, "server.json").unlink(missing_ok=True)


def remove_store(folder: str | None) -> None:
    """Remove the store beside the record of a server that has ended; None: the server has no record."""
    if folder is not None:
        shutil.rmtree(Path(folder, "store"), ignore_errors=True)


def last_port(folder: Path) -> int:
    """Return the last port for clients; 0 if there was none."""
    with suppress(OSError, ValueError):
        return int((folder / "port").read_text())
    return 0


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Exclude other drivers while a server is started or taken over."""
    with open(folder / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
