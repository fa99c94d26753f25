"""The apps of docs/apps.md read what a job has published."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from compat.conformance.servers import sparkis_server
from compat.waiting import WAIT_S_MAX
from sparkis import Change, LogWriter, Op, StateDescriptor

PAGE = Path(__file__).parents[2] / "docs" / "apps.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ADDRESS = "127.0.0.1:7379"
TEMPERATURES = {"EWR": b"36.0", "JFK": b"37.94", "LGA": b"35.06"}
METRICS = {b"flights": b"7", b"meanDepartureDelay": b"2.5"}


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("apps")
    highest = StateDescriptor("maxTemperature", key="origin", value="temp")
    golden = StateDescriptor("golden", key="carrier", field="name", value="value")
    with LogWriter(folder / "log", "weather", [highest]) as writer:
        writer.publish(
            Change("maxTemperature", Op.PUT, b"weather:maxTemperature:%b" % station.encode(), value=temperature)
            for station, temperature in TEMPERATURES.items()
        )
    with LogWriter(folder / "log", "flights", [golden]) as writer:
        writer.publish(
            Change("golden", Op.PUT, b"flights:golden:UA", field=name, value=value) for name, value in METRICS.items()
        )
    with sparkis_server(folder / "store", folder / "log") as server:
        yield f"127.0.0.1:{server.port}"


def code(language: str, has: str, address: str) -> str:
    """Return the block of the page that contains a text, for another address."""
    [found] = [text for name, text in BLOCK.findall(PAGE.read_text()) if name == language and has in text]
    return found.replace(ADDRESS, address)


def test_fastapi_example_answers_json(address: str) -> None:
    import httpx

    names: dict[str, object] = {}
    exec(compile(code("python", "FastAPI", address), "apps.md", "exec"), names)

    async def read() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app=names["app"])  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            return [await client.get(f"/carriers/{carrier}") for carrier in ("UA", "XX")]

    found, missing = asyncio.run(read())
    assert found.json() == {"flights": 7.0, "meanDepartureDelay": 2.5}
    assert (missing.status_code, missing.json()) == (404, {"detail": "no flights of XX"})


def test_django_example_reads_from_its_cache(address: str, tmp_path: Path) -> None:
    app = tmp_path / "myapp"
    app.mkdir()
    app.joinpath("__init__.py").touch()
    app.joinpath("cache.py").write_text(code("python", "plain_key(", address))
    app.joinpath("views.py").write_text(code("python", "JsonResponse", address))
    app.joinpath("settings.py").write_text(code("python", "CACHES", address))
    program = """
import django
from django.conf import settings
from myapp.settings import CACHES
settings.configure(CACHES=CACHES, ALLOWED_HOSTS=["testserver"])
django.setup()
from django.core.cache import caches
from django.test import RequestFactory
from myapp.views import temperatures
print(temperatures(RequestFactory().get("/?station=JFK&station=LGA&station=XXX")).content.decode())
try:
    caches["state"].set("weather:maxTemperature:JFK", 1)
except Exception as error:
    print(type(error).__name__)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=WAIT_S_MAX, check=False
    )
    assert done.returncode == 0, done.stderr
    reply, refused = done.stdout.splitlines()
    assert json.loads(reply) == {"JFK": 37.94, "LGA": 35.06}
    assert refused == "ReadOnlyError"


def test_node_redis_example_prints_values(address: str) -> None:
    done = subprocess.run(
        ["node", "--input-type=module", "-e", code("js", "createClient", address)],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["{", "EWR:", "36,", "JFK:", "37.94,", "LGA:", "35.06", "}"]
