"""The process of the page: its socket, its addresses, its end."""

from __future__ import annotations

import argparse
import ipaddress
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

import uvicorn

from sparkis_ui.app import make_app
from sparkis_ui.client import PASSWORD_VARIABLE, Endpoint
from sparkis_ui.guards import LOOPBACK

STOP_S_MAX = 3  # for tabs that are open
BACKLOG = 128


def serve(options: argparse.Namespace) -> None:
    """Serve the page until a signal arrives. ValueError: wrong options. OSError: the address cannot be used."""
    endpoint = endpoint_of(options)
    is_tls = options.page_cert_file is not None
    if is_tls != (options.page_key_file is not None):
        raise ValueError("--page-cert-file and --page-key-file belong together")
    listener = _listener(options.bind, options.port)
    port = listener.getsockname()[1]
    app = make_app(endpoint, names(options.bind, options.host_name), is_tls=is_tls)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        ssl_certfile=options.page_cert_file,
        ssl_keyfile=options.page_key_file,
        timeout_graceful_shutdown=STOP_S_MAX,
        ws="websockets-sansio",
        ws_max_size=1024,  # a browser sends nothing
        proxy_headers=False,
        lifespan="on",
    )
    server = uvicorn.Server(config)

    def end(*ignored: object) -> None:
        server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        # Until uvicorn sets its own handlers, and again at its end, when it raises the signal once more.
        signal.signal(number, end)
    host = f"[{options.bind}]" if ":" in options.bind else options.bind
    print(f"{'https' if is_tls else 'http'}://{host}:{port} shows {endpoint.url}; Ctrl-C ends it", flush=True)
    if options.child:
        threading.Thread(target=_end_with_input, args=(server,), daemon=True).start()
    server.run([listener])
    if not options.child:
        print("ended", file=sys.stderr)


def _end_with_input(server: uvicorn.Server) -> None:
    """End a server when standard input ends: the parent process has ended, or closed it."""
    while os.read(0, 4096):  # not `sys.stdin`, whose lock would be in the way at the end
        pass
    server.should_exit = True


def endpoint_of(options: argparse.Namespace) -> Endpoint:
    """Return the endpoint of the options; ValueError if other machines could use its user without signing in."""
    endpoint = Endpoint.of_options(options)
    if endpoint.password and not is_loopback(options.bind):
        raise ValueError(
            f"a password in --url or {PASSWORD_VARIABLE} would sign in everybody who reaches this page: leave it out, "
            "and sign in on the page, or leave out --bind"
        )
    return endpoint


def is_loopback(address: str) -> bool:
    """Return whether only this machine can reach an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"


def names(bind: str, given: Sequence[str]) -> list[str]:
    """Return the names under which browsers may reach the page."""
    return [*LOOPBACK, bind, *given]


def _listener(bind: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        return socket.create_server((bind, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(f"cannot listen at {bind}:{port}: {error.strerror or error}") from None
