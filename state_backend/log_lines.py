"""The lines that our processes log to stderr: one for each message, as text or as JSON.

    2026-01-31 12:00:00,000 WARNING sparkis.tls: ...
    {"time": "2026-01-31T12:00:00.000Z", "level": "warning", "part": "sparkis.tls", "pid": 7, "message": "..."}

`set_up` configures a program. Its child processes inherit the choice in a variable of the environment, and call
`set_up_child`. A line break in a message, or in a traceback, is written as the two characters `\\n`. Passwords in URLs
are hidden, whoever logs them. Repeated messages are counted (see `CountingHandler`).
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "nothing": logging.CRITICAL + 1,
}
FORMATS = ("text", "json")
# The parts of sparkis, by what they log about.
PARTS = {
    "sparkis.acl": "users and their rights",
    "sparkis.announcements": "announcements of a writer's epochs to servers",
    "sparkis.applier": "applying a log's epochs to a store",
    "sparkis.attach": "attachments",
    "sparkis.clients": "clients' connections and requests",
    "sparkis.compactor": "snapshots and sweeps",
    "sparkis.control": "connections between our own processes",
    "sparkis.executors": "state servers on executors",
    "sparkis.log": "the change log",
    "sparkis.metrics": "the listener of metrics and health",
    "sparkis.proxy": "proxies and upstreams",
    "sparkis.registry": "registries",
    "sparkis.serve": "servers that a driver starts",
    "sparkis.server": "servers, their jobs and processes",
    "sparkis.sink": "sinks",
    "sparkis.tls": "TLS and certificates",
}
# What a child process inherits: format and levels.
CHILD_VARIABLE = "SPARKIS_CHILD_LOG"

# Called after each `set_up` with the new value of CHILD_VARIABLE, for child processes that run already.
on_set_up: list[Callable[[str], None]] = []

WINDOW_S = 10.0
# So many different lines of one message are logged in each window; the rest are counted (guess).
LINES_MAX = 20
WINDOWS_MAX = 1000

# A password may have any of `/`, `:` and `@`, as secret keys of object stores do.
PASSWORD_IN_URL = re.compile(r"(\b[a-z][a-z0-9+.-]*://[^\s:/@'\"]*):[^\s'\"]+@", re.IGNORECASE)
SECRET_IN_QUERY = re.compile(
    r"([?&][^=&\s]*(?:password|secret|token|signature|credential|key)[^=&\s]*=)[^&\s'\"]+", re.I
)
CONTROL = {code: f"\\x{code:02x}" for code in (*range(32), 127)} | {10: "\\n", 13: "\\r", 9: "\t"}


def parse_levels(text: str) -> Mapping[str, int]:
    """Parse `LEVEL,PART=LEVEL,...`: the level of all parts, "" in the result, and those of some; ValueError."""
    levels = {"": logging.INFO}
    for each in filter(None, text.split(",")):
        part, is_given, level = each.rpartition("=")
        if level.lower() not in LEVELS:
            raise ValueError(f"{level!r} is no level; give one of {', '.join(LEVELS)}")
        if is_given and part not in PARTS:
            raise ValueError(f"{part!r} is no part of sparkis; give one of {', '.join(PARTS)}")
        levels[part] = LEVELS[level.lower()]
    return levels


def hide_secrets(text: str) -> str:
    """Replace passwords in URLs, and secrets in their queries, by `***`."""
    return SECRET_IN_QUERY.sub(r"\1***", PASSWORD_IN_URL.sub(r"\1:***@", text))


_process = ""  # the name that `set_up` gave this process


class TextFormatter(logging.Formatter):
    """One line of text.

    Args:
        process: Stands for the part if it is given.
    """

    def __init__(self, process: str = "") -> None:
        super().__init__("%(asctime)s %(levelname)s " + (process or "%(name)s") + ": %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return hide_secrets(super().format(record)).translate(CONTROL)


class JsonFormatter(logging.Formatter):
    """One JSON object."""

    def __init__(self, process: str = "") -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, object] = {
            "time": f"{at}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "part": record.name,
            "pid": record.process,
            "message": hide_secrets(record.getMessage()),
        }
        if self._process:
            fields["process"] = self._process
        if repeated := getattr(record, "repeated", 0):
            fields["repeated"] = repeated
        if record.exc_info:
            fields["exception"] = hide_secrets(self.formatException(record.exc_info))
        return json.dumps(fields, ensure_ascii=False)


@dataclass
class Window:
    """The lines of one message since a time."""

    since_s: float
    texts: set[str] = field(default_factory=set)
    repeated: int = 0
    last: logging.LogRecord | None = None


class CountingHandler(logging.StreamHandler[TextIO]):
    """Writes lines, and counts repeated ones instead of writing them.

    In a window of `WINDOW_S` after a message, a line that was written before is counted, and so are others of the same
    message after `LINES_MAX` lines. At the window's end the last line is written, with the count.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._windows: dict[tuple[str, int, str], Window] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Write or count a record; the caller has the handler's lock."""
        key, text, now_s = (record.name, record.levelno, str(record.msg)), record.getMessage(), self._clock()
        window = self._windows.get(key)
        if window is None or now_s - window.since_s >= WINDOW_S:
            self._end_windows(now_s)
            window = self._windows[key] = Window(now_s)
        if text in window.texts or len(window.texts) >= LINES_MAX:
            window.repeated, window.last = window.repeated + 1, record
            self._begin_timer()
        else:
            window.texts.add(text)
            super().emit(record)

    def report_counts(self) -> None:
        """Write the counts of the windows that have ended."""
        self.acquire()
        try:
            self._timer = None
            self._end_windows(self._clock())
            if any(window.repeated for window in self._windows.values()):
                self._begin_timer()
        finally:
            self.release()

    def close(self) -> None:
        """Write all counts; at the end of the process."""
        self.acquire()
        try:
            self._end_windows(float("inf"))
            if self._timer is not None:
                self._timer.cancel()
        finally:
            self.release()
        super().close()

    def _end_windows(self, now_s: float) -> None:
        ended = [key for key, window in self._windows.items() if now_s - window.since_s >= WINDOW_S]
        if len(self._windows) - len(ended) >= WINDOWS_MAX:  # bound the memory: all counts are written early
            ended = list(self._windows)
        for key in ended:
            window = self._windows.pop(key)
            if window.last is not None:
                seconds = self._clock() - window.since_s
                text = f"{window.last.getMessage()} (repeated {window.repeated} times in {seconds:.0f} s)"
                fields = {**vars(window.last), "msg": text, "args": (), "repeated": window.repeated}
                super().emit(logging.makeLogRecord(fields))

    def _begin_timer(self) -> None:
        if self._timer is None:
            self._timer = threading.Timer(WINDOW_S, self.report_counts)
            self._timer.daemon = True
            self._timer.start()


def set_up(levels: str, line_format: str, process: str = "") -> None:
    """Log to stderr from now on, here and in child processes that start later.

    Args:
        process: A name of this process.
    """
    os.environ[CHILD_VARIABLE] = f"{line_format} {levels}"
    root = logging.getLogger()
    if not any(isinstance(each, CountingHandler) for each in root.handlers):
        root.addHandler(CountingHandler(sys.stderr))
    for handler in root.handlers:
        if isinstance(handler, CountingHandler):
            handler.setFormatter(JsonFormatter(process) if line_format == "json" else TextFormatter(process))
    parsed = parse_levels(levels)
    root.setLevel(parsed[""])
    for part in PARTS:
        logging.getLogger(part).setLevel(parsed.get(part, logging.NOTSET))
    global _process
    _process = process
    for each in on_set_up:
        each(os.environ[CHILD_VARIABLE])


def set_up_child(process: str = "") -> None:
    """Log as the parent process does; with level INFO if the parent is no program of sparkis."""
    set_up_as(inherited(), process)


def set_up_as(inherited: str, process: str = "") -> None:
    """Log as a value of CHILD_VARIABLE says."""
    line_format, _, levels = inherited.partition(" ")
    set_up(levels, line_format, process)


def inherited() -> str:
    """Return what child processes that start now inherit."""
    return os.environ.get(CHILD_VARIABLE, "text info")


def set_levels(levels: str) -> None:
    """Log with other levels from now on, in the same format."""
    set_up(levels, inherited().partition(" ")[0], _process)
