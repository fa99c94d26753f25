"""The endpoint of a server beside the driver that outlives a crash of the driver (see `detached_server`)."""

from __future__ import annotations

import atexit
import logging
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from resp_server.net.tls import TlsFiles
from spark_hooks.serving import endpoints
from spark_hooks.serving.detached_server import DetachedServer

logger = logging.getLogger("sparkis.serve")


class DetachedEndpoint(endpoints.ServedEndpoint):
    """A server process beside the driver. It outlives a crash of the driver; if `port` is chosen, also its exit.

    If the server dies, it is restarted on the same port with the same store.

    Args:
        outlives_exit: Whether the server outlives an orderly exit. Default: if `port` is chosen.
        has_proxy: Clients are answered by a proxy with an upstream, and the server is behind it, without TLS.
    """

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        *,
        log: str,
        host: str,
        port: int,
        password: str | None,
        store: str | None,
        linger_s: float,
        tls: TlsFiles | None = None,
        has_proxy: bool = False,
        outlives_exit: bool | None = None,
    ) -> None:
        super().__init__()
        self.log = log
        self.has_proxy = has_proxy
        self.tls = None if has_proxy else tls
        self._outlives_exit = port != 0 if outlives_exit is None else outlives_exit
        self.address_file = temporary_folder("server") / "address.json"  # other users cannot read the folder
        self._server = DetachedServer(
            command,
            environment,
            log=log,
            port=port,
            store=store,
            tls=self.tls,
            linger_s=linger_s,
        )
        self._server.on_change = self._on_change
        self.port = self._server.record.port
        self._address().write(self.address_file)
        self.url = endpoints.url_of(host, self.port, password, tls)
        endpoints.add(log, self)
        atexit.register(self._exit)
        # Programs show warnings by default: a process that may stay behind is announced.
        logger.log(logging.WARNING if linger_s else logging.INFO, "%s", self)

    def __str__(self) -> str:
        return self._server.lifetime_text(outlives_exit=self._outlives_exit)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._server.record.pid

    def has_options(self, command: list[str], environment: dict[str, str], port: int, store: str | None) -> bool:
        """Return whether these options would start the same server."""
        return not self._stopping.is_set() and self._server.has_options(command, environment, port, store)

    def set_linger(self, linger_s: float) -> None:
        """Change how long the server outlives this driver."""
        self._server.set_linger(linger_s)

    def stop(self) -> None:
        """Stop the server at once, unless another driver uses it. The log stays unchanged."""
        self._end(self._server.stop)

    def _exit(self) -> None:
        """Handle the driver's exit: the server stays for its linger time if its port was chosen, else it ends."""
        self._end(self._server.leave if self._outlives_exit else self._server.stop)

    def _end(self, end: Callable[[], None]) -> None:
        self._stopping.set()
        atexit.unregister(self._exit)
        endpoints.remove(self.log, self)
        with self._lock:
            self._disconnect()
        end()
        shutil.rmtree(self.address_file.parent, ignore_errors=True)

    def _on_change(self) -> None:
        with self._lock:
            self._disconnect()
        with suppress(OSError):  # `stop` may have removed the folder
            self._address().write(self.address_file)

    def _address(self) -> endpoints.ControlAddress:
        return self._server.address


def temporary_folder(purpose: str) -> Path:
    """Make a folder that is removed when this process exits."""
    folder = Path(tempfile.mkdtemp(prefix=f"sparkis-{purpose}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
