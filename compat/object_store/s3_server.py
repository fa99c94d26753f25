"""An S3 server in a process of its own: moto's, with one bucket.

    python -m compat.object_store.s3_server BUCKET [ADDRESS]

It listens on a free port of an address (127.0.0.1), prints the port, and ends with its standard input. Its data is in
memory.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

Application = Callable[[dict[str, Any], Any], Iterable[bytes]]

LOOPBACK = "127.0.0.1"
# moto accepts any credentials; clients need some.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


def environment(port: int, address: str = LOOPBACK) -> dict[str, str]:
    """Return AWS' environment variables for a process that uses the server."""
    return CREDENTIALS | {"AWS_ENDPOINT_URL": f"http://{address}:{port}"}


@contextmanager
def running(bucket: str) -> Iterator[int]:
    """Run a server; return its port."""
    command = [sys.executable, "-m", "compat.object_store.s3_server", bucket]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeError("the S3 server did not start")
        yield int(line)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait()


def _one_at_a_time(application: Application) -> Application:
    """Make requests atomic: moto checks for a name and creates it in two steps, S3 in one."""
    lock = threading.Lock()

    def locked(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        with lock:
            return application(environ, start_response)

    return locked


def main() -> None:
    """Serve until standard input ends."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: object) -> None:
            pass

    application = _one_at_a_time(DomainDispatcherApplication(create_backend_app))
    bucket, address = (*sys.argv[1:], LOOPBACK)[:2]
    server = make_server(address, 0, application, threaded=True, request_handler=Quiet)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made = urllib.request.Request(f"http://{address}:{server.port}/{bucket}", method="PUT")
    urllib.request.urlopen(made).close()
    print(server.port, flush=True)
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
