"""Writes the screenshots of `sparkis ui` into docs/images: `make screenshots`. It takes a minute and a half.

A server, and a cluster of four, show the log of `compat.page.world` to a client, until graphs have their width.
"""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic, sleep

from PIL import Image
from selenium.webdriver import Chrome

from compat.conformance.servers import Running, free_port, sparkis_server
from compat.conformance.wire import Connection, request
from compat.page.browser import LAPTOP, PHONE, chromium, has_chromium, page_of
from compat.page.world import PLANES, Writer

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
WATCHED = "/watch?key=game:top:monday&key=weather:maxTemperature:JFK&pattern=weather:latest:*&key=flights:golden:UA"
# The name of each picture: the path, the theme, and the size.
OF_A_SERVER = {
    "ui-overview-light": ("/overview", "light", LAPTOP),
    "ui-overview-dark": ("/overview", "dark", LAPTOP),
    "ui-browse": ("/browse?job=flights&state=golden", "light", LAPTOP),
    "ui-key": ("/key?key=game:top:monday", "light", LAPTOP),
    "ui-watch": (WATCHED, "dark", LAPTOP),
    "ui-history": ("/history?key=weather:maxTemperature:JFK", "light", LAPTOP),
    "ui-slow": ("/slow", "light", LAPTOP),
    "ui-phone": ("/overview", "dark", PHONE),
}
OF_A_CLUSTER = {"ui-cluster": ("/cluster", "light", LAPTOP)}
WARMING_S = 70.0  # the width of graphs is a minute
SETTLING_S = 3.0  # of a page: flashes have ended, and series of watched keys have begun
RANGES = ("0-5460", "5461-10922", "10923-16383")
READS_A_ROUND = 40
COLOURS = 128  # a third of the size


def main() -> int:
    """Take all pictures; return the exit code."""
    if not has_chromium():
        print("screenshots: chromium and chromedriver are missing: make setup-test", file=sys.stderr)
        return 1
    IMAGES.mkdir(exist_ok=True)
    with TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        (folder / "log").mkdir()
        writer = Writer(folder / "log")
        writer.step()
        stack.enter_context(writer)
        options = ("--notify-keyspace-events", "KEA", "--slowlog-log-slower-than", "300")
        server = stack.enter_context(sparkis_server(folder / "store", folder / "log", *options, port=7379))
        nodes = list(cluster(folder, stack))
        stack.enter_context(readers(server, *nodes))
        browser = stack.enter_context(chromium(folder / "profile"))
        single = stack.enter_context(page_of(f"redis://127.0.0.1:{server.port}"))
        many = stack.enter_context(page_of(f"redis://127.0.0.1:{nodes[0].port}"))
        warm(browser, single + WATCHED)
        for url, pictures in ((single, OF_A_SERVER), (many, OF_A_CLUSTER)):
            for picture, (path, theme, size) in pictures.items():
                take(browser, url + path, theme, size, IMAGES / f"{picture}.png")
    return 0


def cluster(folder: Path, stack: ExitStack) -> Iterator[Running]:
    """Start three servers, and a replica of the first."""
    ports = [free_port() for _ in range(len(RANGES) + 1)]
    rows = [*({"slots": slots} for slots in RANGES), {"replica_of": f"127.0.0.1:{ports[0]}"}]
    nodes = [{"host": "127.0.0.1", "port": port, **row} for port, row in zip(ports, rows, strict=True)]
    topology = folder / "cluster.json"
    topology.write_text(json.dumps({"version": 1, "nodes": nodes}))
    for port in ports:
        options = ("--cluster", str(topology), "--cluster-node", f"127.0.0.1:{port}")
        yield stack.enter_context(sparkis_server(folder / str(port), folder / "log", *options, port=port))


@contextmanager
def readers(*servers: Running) -> Iterator[None]:
    """Read keys of all servers, more and less of them in turn."""
    is_stopped = threading.Event()

    def read() -> None:
        connections = [Connection(each.port) for each in servers]
        while not is_stopped.wait(0.05):
            count = int(READS_A_ROUND * (1.5 + math.sin(monotonic() / 7)))
            reads = [request("GET", f"plane/N{10_000 + number * 7 % PLANES}") for number in range(count)]
            for each in connections:
                each.send(b"".join(reads))
                for _ in reads:
                    each.read()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_stopped.set()
        thread.join()


def warm(browser: Chrome, url: str) -> None:
    """Look at a page, so that its program asks the server, until graphs have their width."""
    browser.get(url)
    sleep(WARMING_S)


def take(browser: Chrome, url: str, theme: str, size: tuple[int, int], file: Path) -> None:
    """Write a picture of a page."""
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [
        {"name": "prefers-color-scheme", "value": theme},
        {"name": "prefers-reduced-motion", "value": "reduce"},  # no flash in a picture
    ]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(url)
    sleep(SETTLING_S)
    browser.save_screenshot(str(file))
    Image.open(file).convert("RGB").quantize(COLOURS).save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size // 1024} kB")


if __name__ == "__main__":
    sys.exit(main())
