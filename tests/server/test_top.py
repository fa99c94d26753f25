"""`sparkis top` at a real server: in a terminal as a person has it, and with keys as Textual's pilot presses them."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from compat.conformance.dataset import Dataset
from compat.conformance.servers import Running, child_environment, free_port, sparkis_server, wait_for_keys
from compat.waiting import WAIT_S_MAX, eventually_async
from sparkis_ui import facts
from sparkis_ui.client import Endpoint
from sparkis_ui.top.app import Top
from sparkis_ui.top.tables import ROWS_MAX, TABLES

PROGRAM = [sys.executable, "-m", "sparkis", "top"]
SIZE = (160, 40)


def endpoint(server: Running) -> Endpoint:
    """Return a server's endpoint."""
    return Endpoint.of_url(f"redis://127.0.0.1:{server.port}")


def rows(app: Top) -> list[str]:
    """Return the shown lines of the table."""
    table = app.query_one(DataTable)
    return [table.render_line(line).text.strip() for line in range(table.row_count + 1)] if table.display else []


async def until(app: Top, pilot: Pilot[None], pattern: str) -> None:
    """Wait, from turn to turn of the loop, until the table or what is shown in its place contains a text."""
    async with asyncio.timeout(WAIT_S_MAX):
        while not re.search(pattern, "\n".join([*rows(app), *(str(each.content) for each in app.query(Static))])):
            await app._hub.wait_for_turn(app._hub.turn + 1)
            await pilot.pause()


def test_jobs_and_states_of_server_are_shown_sorted_and_filtered(sparkis: Running, dataset: Dataset) -> None:
    app = Top(endpoint(sparkis), "jobs")

    async def look() -> None:
        async with app.run_test(size=SIZE) as pilot:
            await until(app, pilot, rf"job .* {len(dataset.keys):,} ")
            await pilot.press("2")
            await until(app, pilot, "KEY FORMAT")
            states = rows(app)[1:]
            assert len(states) > 3
            await pilot.press("greater_than_sign", "greater_than_sign")
            await pilot.pause()
            heading, *ascending = rows(app)
            assert "STATE ▲" in heading and len(ascending) == len(states)
            await pilot.press("r")
            await pilot.pause()
            heading, *descending = rows(app)
            names = [line.split()[1] for line in descending]
            assert "STATE ▼" in heading and names == sorted(names, reverse=True)
            await pilot.press("slash", *"list", "enter")
            await pilot.pause()
            assert 0 < len(rows(app)[1:]) < len(states) and all("list" in line for line in rows(app)[1:])
            await pilot.press("escape")
            await pilot.pause()
            assert len(rows(app)[1:]) == len(states)

    asyncio.run(look())


def test_each_table_is_shown(sparkis: Running) -> None:
    app = Top(endpoint(sparkis), "jobs")

    async def look() -> None:
        async with app.run_test(size=SIZE) as pilot:
            shown = (
                "live|stale",
                "KEY FORMAT",
                "cluster support disabled",
                "STATE JOBS",
                "default",
                "REQUEST|no slow",
            )
            for number, text in zip(range(1, len(TABLES) + 1), shown, strict=True):
                await pilot.press(str(number))
                await until(app, pilot, text)
            await pilot.press("question_mark")
            assert "Any key closes this help" in str(app.screen.query_one("#help", Static).content)
            await pilot.press("x")
            assert not app.screen.query("#help")

    asyncio.run(look())


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_all_numbers_and_help_fit_into_terminal(sparkis: Running, columns: int) -> None:
    app = Top(endpoint(sparkis), "jobs")

    def missing(*words: str) -> list[str]:
        screen = re.sub(r"<[^>]+>|\s+|&#160;", " ", app.export_screenshot())
        return [word for word in words if word not in screen]

    async def look() -> None:
        async with app.run_test(size=(columns, 40)) as pilot:
            for keys, words in (
                ((), ("jobs", "oldest", "reads/s", "clients", "BEHIND" if columns > 40 else "JOB")),
                (("question_mark",), ("contain", "furthest", "commands", "closes")),
            ):
                await pilot.press(*keys)
                await eventually_async(lambda words=words: missing(*words), lambda found: not found, "all words")

    asyncio.run(look())


def test_keys_are_those_of_table_also_after_empty_one_and_help(sparkis: Running) -> None:
    app = Top(endpoint(sparkis), "jobs")

    async def look() -> None:
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("slash", "escape", "3")
            await until(app, pilot, "cluster support disabled")
            await pilot.press("question_mark", "x", "2")
            await until(app, pilot, "KEY FORMAT")
            assert app.focused is app.query_one(DataTable)
            await pilot.press("down")
            assert app.query_one(DataTable).cursor_row == 1
            await pilot.press("q")
            assert not app.is_running

    asyncio.run(look())


def test_server_that_is_lost_and_comes_back_is_read_again(tmp_path: Path, dataset_log: Path, dataset: Dataset) -> None:
    port = free_port()
    with sparkis_server(tmp_path / "first", dataset_log, "--port", str(port)) as server:
        wait_for_keys(server, len(dataset.keys))
        app = Top(endpoint(server), "jobs")

    async def look() -> None:
        async with app.run_test(size=SIZE) as pilot:
            await until(app, pilot, "does not answer: .*; trying again")
            with sparkis_server(tmp_path / "second", dataset_log, "--port", str(port)):
                await until(app, pilot, rf"job .* {len(dataset.keys):,} ")
                assert not app.query_one("#where").has_class("lost")

    asyncio.run(look())


def test_cut_table_shows_how_many_rows_there_are(sparkis: Running) -> None:
    app = Top(endpoint(sparkis), "jobs")

    async def look() -> None:
        async with app.run_test(size=SIZE) as pilot:
            await until(app, pilot, "job .* ")
            await pilot.press("p")  # the shown facts stay
            app._hub.facts.jobs = facts.jobs_of([{"name": b"%d" % number} for number in range(ROWS_MAX + 20)])
            app._show()
            assert f"the first {ROWS_MAX} of {ROWS_MAX + 20} rows" in str(app.query_one("#where", Static).content)

    asyncio.run(look())


class Terminal:
    """`sparkis top` in a terminal."""

    def __init__(self, *arguments: str) -> None:
        self._main, child = pty.openpty()
        termios.tcsetwinsize(child, (40, 160))
        environment = {**child_environment(), "TERM": "xterm-256color"}
        command = [*PROGRAM, *arguments]
        self.process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment)
        os.close(child)
        self.shown = ""

    def wait_for(self, text: str) -> None:
        """Read what is shown until it contains a text."""
        ends = monotonic() + WAIT_S_MAX
        while text not in self.shown:
            ready, _, _ = select.select([self._main], [], [], max(0.0, ends - monotonic()))
            assert ready, f"{text!r} was not shown, but {self.shown!r}"
            self.shown += os.read(self._main, 65_536).decode("utf-8", "replace")

    def type(self, text: str) -> None:
        """Press keys."""
        os.write(self._main, text.encode())

    def end(self) -> tuple[int, str]:
        """Read until the program ends; return its exit code and the last line that it left."""
        with suppress(OSError):  # EIO: the other end is closed
            while True:
                self.shown += os.read(self._main, 65_536).decode("utf-8", "replace")
        return self.process.wait(WAIT_S_MAX), re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", self.shown).strip().splitlines()[
            -1
        ]

    def close(self) -> None:
        """End the program, if it runs."""
        self.process.kill()
        self.process.wait()
        os.close(self._main)


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    """The terminals of a test, which are closed after it."""
    made: list[Terminal] = []
    yield made
    for each in made:
        each.close()


def test_top_shows_jobs_and_ends_with_q(sparkis: Running, terminals: list[Terminal]) -> None:
    terminal = Terminal("--url", f"redis://127.0.0.1:{sparkis.port}")
    terminals.append(terminal)
    terminal.wait_for("CHANGES/MIN")
    terminal.type("q")
    assert terminal.end()[0] == 0


def test_server_with_password_is_refused_without_it(locked_sparkis: Running, terminals: list[Terminal]) -> None:
    terminal = Terminal("--url", f"redis://127.0.0.1:{locked_sparkis.port}")
    terminals.append(terminal)
    code, said = terminal.end()
    assert code == 1 and "sparkis top: " in said and "give a user and a password in --url" in said


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "sparkis top: this is no terminal; `sparkis status` prints the same facts, with --json for programs"),
        (("--table", "none"), "argument --table: invalid choice: 'none'"),
    ],
)
def test_wrong_option_is_reported(arguments: tuple[str, ...], error: str) -> None:
    done = subprocess.run(
        [*PROGRAM, *arguments],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0 and error in done.stderr


def test_invalid_url_is_reported(terminals: list[Terminal]) -> None:
    terminal = Terminal("--url", "http://127.0.0.1:1")
    terminals.append(terminal)
    said = (
        "sparkis top: 'http://127.0.0.1:1' is not a URL of the form redis://host[:port], or rediss://... for TLS; "
        "special characters of a password are written as %XX, and an IPv6 address is in brackets"
    )
    assert terminal.end() == (1, said)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_top_and_restores_terminal(terminals: list[Terminal], number: signal.Signals) -> None:
    terminal = Terminal("--url", f"redis://127.0.0.1:{free_port()}")
    terminals.append(terminal)
    terminal.wait_for("\x1b[?1049h")  # the screen beside the terminal's lines begins
    terminal.process.send_signal(number)
    assert terminal.end()[0] == 0
    assert "\x1b[?1049l" in terminal.shown and "Traceback" not in terminal.shown
