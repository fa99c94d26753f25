"""A log with five jobs as a team would have them, written without Spark: airlines, weather, a game, payments, odd keys.

`Writer.step` commits one more epoch of the three jobs that run. `payments` and `odd` have ended, so they are stale.
"""

from __future__ import annotations

import json
import math
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from state_backend.codec import packed_map
from state_backend.log.log_writer import LogWriter
from state_backend.model.descriptor import StateDescriptor
from state_backend.model.records import Change, Op

CARRIERS = ("AA", "AS", "B6", "DL", "EV", "F9", "HA", "MQ", "UA", "US", "VX", "WN")
STATIONS = ("EWR", "JFK", "LGA")
AIRPORTS = ("ATL", "BOS", "CLT", "DEN", "LAX", "MIA", "ORD", "SFO", "SEA", "TPA")
PLAYERS = ("ada", "alan", "barbara", "donald", "edsger", "grace", "john", "katherine", "leslie", "linus", "margaret")
PLANES = 400
STEP_S = 0.5
LARGE_BYTES = 5 << 20
SCRIPT = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
MARKUP = f"odd:values:{SCRIPT}".encode()
CONTROLS = b"odd:values:\x00\x1b[31m\r\n\xff\xfe"
LARGE = b"odd:values:large"
JSON = b"odd:values:json"
TTL_MS = 7_200_000
MANY_FIELDS = b"odd:fields:many"
DECIMALS = b"odd:fields:decimals"
FIELDS = 5000

FLIGHTS = (
    StateDescriptor("golden", key="carrier", value=("flights", "cancelled", "meanDelay", "miles")),
    StateDescriptor("delayByDay", key="route", value="delay", field="day"),
    StateDescriptor("lastFlight", key_format="plane/<tailnum>", value="last"),
    StateDescriptor("recent", key="tailnum", value="departure", kind="list", length_max=20),
)
WEATHER = (
    StateDescriptor("maxTemperature", key="origin", value="temp"),
    StateDescriptor("latest", key="origin", value=("temp", "humid", "wind")),
)
GAME = (
    StateDescriptor("top", key="day", member="player", score="points"),
    StateDescriptor("online", key="room", member="player"),
)
PAYMENTS = (StateDescriptor("total", key="account", value="amount"),)
ODD = (StateDescriptor("values", key="key", value="value"), StateDescriptor("fields", key="key", value="v", field="f"))


class Writer:
    """Writes the jobs of a log. With `with`, a thread commits an epoch of each running job every half a second."""

    def __init__(self, root: Path, seed: int = 1) -> None:
        self._random = random.Random(seed)
        self._stack = ExitStack()
        self._step = 0
        self._is_stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._points = dict.fromkeys(PLAYERS, 1000.0)
        self._flights = dict.fromkeys(CARRIERS, 0)
        with LogWriter(root, "payments", PAYMENTS) as payments:
            payments.publish(_put("total", f"payments:total:{n}", f"{n * 12.5}") for n in range(40))
        with LogWriter(root, "odd", ODD) as odd:
            odd.publish(odd_changes(odd.clock_ms()))
        opened = {"flights": FLIGHTS, "weather": WEATHER, "game": GAME}
        self._logs = {name: self._stack.enter_context(LogWriter(root, name, states)) for name, states in opened.items()}

    def step(self) -> None:
        """Commit one epoch of each running job."""
        self._step += 1
        self._logs["flights"].publish(self._flight_changes())
        self._logs["weather"].publish(self._weather_changes(self._logs["weather"].clock_ms()))
        self._logs["game"].publish(self._game_changes())

    def _flight_changes(self) -> Iterator[Change]:
        chance, is_first = self._random, self._step == 1
        for carrier in CARRIERS if is_first else chance.sample(CARRIERS, 4):
            self._flights[carrier] += chance.randrange(5, 60)
            flights = self._flights[carrier]
            facts = {
                "flights": flights,
                "cancelled": flights // 37,
                "meanDelay": round(12 + 9 * math.sin(self._step / 9 + flights), 2),
                "miles": flights * 1040,
            }
            packed = packed_map.pack((name.encode(), str(value).encode()) for name, value in facts.items())
            yield Change("golden", Op.PUT, f"flights:golden:{carrier}".encode(), value=packed)
        for plane in range(PLANES) if is_first else chance.sample(range(PLANES), 30):
            tail, origin, to = f"N{plane + 10000}", chance.choice(STATIONS), chance.choice(AIRPORTS)
            delay = round(chance.gauss(6, 14))
            last = {"airline": chance.choice(CARRIERS), "origin": origin, "dest": to, "dep_delay": delay}
            yield _put("lastFlight", f"plane/{tail}", json.dumps(last))
            departure = f"2013-07-{self._step % 28 + 1:02d} {last['airline']} {origin}-{to} {delay:+d}"
            yield Change("recent", Op.APPEND, f"flights:recent:{tail}".encode(), value=departure.encode())
        route = f"flights:delayByDay:{chance.choice(STATIONS)}-{chance.choice(AIRPORTS)}".encode()
        yield Change("delayByDay", Op.PUT, route, f"day-{self._step:04d}".encode(), str(chance.gauss(8, 9)).encode())

    def _weather_changes(self, now_ms: int) -> Iterator[Change]:
        for number, station in enumerate(STATIONS):
            temp = 61 + 14 * math.sin(self._step / 15 + number) + self._random.random()
            yield _put("maxTemperature", f"weather:maxTemperature:{station}", f"{temp:.2f}")
            facts = {"temp": f"{temp:.1f}", "humid": f"{50 + 20 * math.cos(self._step / 11):.0f}", "wind": "9.2"}
            packed = packed_map.pack((name.encode(), value.encode()) for name, value in facts.items())
            key = f"weather:latest:{station}".encode()
            yield Change("latest", Op.PUT, key, value=packed, expire_at_ms=now_ms + 3_600_000)

    def _game_changes(self) -> Iterator[Change]:
        for player in PLAYERS if self._step == 1 else self._random.sample(PLAYERS, 3):
            self._points[player] += self._random.randrange(5, 90)
            points = str(self._points[player]).encode()
            yield Change("top", Op.PUT, b"game:top:monday", player.encode(), points)
        if self._step == 1:
            for player in PLAYERS:
                yield Change("online", Op.PUT, b"game:online:lobby", player.encode(), b"")

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def _run(self) -> None:
        while not self._is_stopped.wait(STEP_S):
            self.step()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the jobs: their writers are gone from then on."""
        self._is_stopped.set()
        if self._thread is not None:
            self._thread.join()
        self._stack.close()


def odd_changes(now_ms: int) -> Iterable[Change]:
    """Return keys and values that would do harm to a page that takes them for anything but text."""
    yield Change("values", Op.PUT, MARKUP, value=SCRIPT.encode())
    yield Change("values", Op.PUT, CONTROLS, value=b"\x00\x01\x1b]0;title\x07\xff \xe2\x80\xae gnp.exe \r\n end")
    yield Change("values", Op.PUT, LARGE, value=b"0123456789abcdef" * (LARGE_BYTES // 16))
    parts = json.dumps({"name": SCRIPT, "list": [1, 2.5, None, {"deep": [True]}]}).encode()
    yield Change("values", Op.PUT, JSON, value=parts, expire_at_ms=now_ms + TTL_MS)
    for number in range(FIELDS):
        yield Change("fields", Op.PUT, MANY_FIELDS, b"field-%04d" % number, b"%d" % number)
    yield Change("fields", Op.PUT, b"odd:fields:markup", SCRIPT.encode(), SCRIPT.encode())
    yield Change("fields", Op.PUT, DECIMALS, b"meanDepartureDelay", b"8.075596816976127")


def _put(state: str, key: str, value: str) -> Change:
    return Change(state, Op.PUT, key.encode(), value=value.encode())
