"""Try an installed sparkis: `release.py` runs this in an environment with the wheel, an extra, and nothing else.

    python release_smoke.py EXTRA

It knows nothing of the checkout. The exit code is 1, with a line, at the first thing that does not work.
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from tempfile import TemporaryDirectory

NO_EXTRA = "none"
KEY, VALUE = b"market:price:ACME", b"12.5"
# Only ends a hang.
WAIT_S_MAX = 120.0


def main(extra: str) -> None:
    """Import, print the version, and serve a tiny log."""
    import sparkis

    program = Path(sys.executable).with_name("sparkis")
    printed = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    require(printed == f"sparkis {sparkis.__version__}\n", f"sparkis --version printed {printed!r}")
    require(sparkis.__version__ == metadata.version("sparkis"), "the metadata has another version")
    require(Path(sparkis.__file__).is_relative_to(sys.prefix), f"sparkis was imported from {sparkis.__file__}")
    import resp_server.backends.servers.native.client_forwarder
    import resp_server.native

    require(resp_server.native.CORE == "compiled", "the core is not compiled")
    modules = list(modules_of(extra))
    for name in modules:
        import_module(name)
    if extra == NO_EXTRA:
        said = subprocess.run([program, "demo"], capture_output=True, text=True, check=False)
        require(said.returncode == 1 and "pip install 'sparkis[demo]'" in said.stderr, f"demo said {said.stderr!r}")
    with TemporaryDirectory() as folder:
        serve_and_read(program, Path(folder))
    print(f"imported {', '.join(modules) or 'nothing further'}; served and read a key")


def require(is_true: bool, otherwise: str) -> None:
    """End the program, with code 1, if something is not as it must be."""
    if not is_true:
        sys.exit(otherwise)


def modules_of(extra: str) -> Iterator[str]:
    """Yield a module of each distribution that an extra, and the extras that it names, require."""
    modules: dict[str, str] = {}
    for module, distributions in sorted(metadata.packages_distributions().items()):
        if re.fullmatch(r"[a-z]\w*", module):
            for each in distributions:
                modules.setdefault(normal(each), module)
    for each in sorted(required(extra)):
        # A namespace (`google`) proves nothing, but that its distribution is there.
        yield modules[each]


def required(extra: str) -> set[str]:
    """Return the distributions that an extra requires."""
    found: set[str] = set()
    for line in metadata.requires("sparkis") or ():
        if re.search(rf"""extra == ["']{re.escape(extra)}["']""", line):
            name, inner = re.match(r"([\w.-]+)(?:\[([^]]*)\])?", line).groups()  # type: ignore[union-attr]
            if normal(name) == "sparkis":
                found |= {each for word in inner.split(",") for each in required(word.strip())}
            else:
                found.add(normal(name))
    return found


def normal(name: str) -> str:
    """Return a distribution's name in its normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def serve_and_read(program: Path, folder: Path) -> None:
    """Write a log, serve it, read its key, and end the server."""
    from sparkis import Change, LogWriter, Op, StateDescriptor

    log = folder / "log"
    with LogWriter(str(log), "market", [StateDescriptor("price", key="ticker", value="price")]) as writer:
        writer.publish([Change("price", Op.PUT, KEY, value=VALUE)])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    output = folder / "server.log"
    with output.open("wb") as written:
        command = [program, "serve", "--log", str(log), "--store", str(folder / "store"), "--port", str(port)]
        server = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT)
    try:
        reply, deadline_s = b"", time.monotonic() + WAIT_S_MAX
        while not reply.startswith(b"$") and server.poll() is None and time.monotonic() < deadline_s:
            reply = asked(port)
        require(reply == b"$%d\r\n%b\r\n" % (len(VALUE), VALUE), f"GET: {reply!r}\n{output.read_text()}")
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(WAIT_S_MAX)
    require(code == 0, f"the server ended with code {code}\n{output.read_text()}")


def asked(port: int) -> bytes:
    """Return the reply to GET; empty if nobody listens yet."""
    try:
        with socket.create_connection(("127.0.0.1", port), WAIT_S_MAX) as connection:
            connection.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(KEY), KEY))
            return connection.recv(1024)
    except OSError:
        time.sleep(0.1)
        return b""


if __name__ == "__main__":
    main(sys.argv[1])
