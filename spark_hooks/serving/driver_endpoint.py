"""The endpoint of a server that ends with this process: that of `sparkis attach`."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from resp_server.net.children import TOKEN_VARIABLE
from spark_hooks.serving import endpoints
from spark_hooks.serving.supervised_process import SupervisedProcess


class DriverEndpoint(endpoints.ServedEndpoint):
    """A server as a child process. If it dies, it restarts with the same port and store."""

    def __init__(self, command: list[str], environment: dict[str, str], *, log: str) -> None:
        super().__init__()
        self.log = log
        self.address_file = temporary_folder("server") / "address.json"  # other users cannot read the folder
        self._token = environment[TOKEN_VARIABLE]
        self._process = SupervisedProcess("the sparkis server", command, environment, self._on_restart)
        self.port = self._process.port
        self._address().write(self.address_file)
        self.url = endpoints.url_of("127.0.0.1", self.port, None)
        endpoints.add(log, self)
        atexit.register(self.stop)

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._process.pid

    def stop(self) -> None:
        """Stop the server. Clients are disconnected, the log stays unchanged."""
        self._stopping.set()
        atexit.unregister(self.stop)
        endpoints.remove(self.log, self)
        with self._lock:
            self._disconnect()
        self._process.stop()
        shutil.rmtree(self.address_file.parent, ignore_errors=True)

    def _on_restart(self, ready_report: dict[str, Any]) -> None:
        with self._lock:
            self._disconnect()
        with suppress(OSError):  # `stop` may have removed the folder
            self._address_in(ready_report).write(self.address_file)

    def _address(self) -> endpoints.ControlAddress:
        return self._address_in(self._process.ready_report)

    def _address_in(self, ready_report: dict[str, Any]) -> endpoints.ControlAddress:
        return endpoints.ControlAddress(ready_report["control_port"], self._token)


def temporary_folder(purpose: str) -> Path:
    """Make a folder that is removed when this process exits."""
    folder = Path(tempfile.mkdtemp(prefix=f"sparkis-{purpose}-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder
