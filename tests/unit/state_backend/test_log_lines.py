"""Lines of the log: one for each message, as text or JSON, without secrets; repeated ones are counted."""

from __future__ import annotations

import io
import json
import logging
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from state_backend.log_lines import (
    LINES_MAX,
    PARTS,
    WINDOW_S,
    CountingHandler,
    JsonFormatter,
    TextFormatter,
    hide_secrets,
    parse_levels,
)

ROOT = Path(__file__).parents[3]


class Log:
    """A logger with a `CountingHandler`, its clock, and what was written."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self.now_s = 100.0
        self._written = io.StringIO()
        self.handler = CountingHandler(self._written, lambda: self.now_s)
        self.handler.setFormatter(formatter)
        self.logger = logging.Logger("sparkis.tls")  # noqa: LOG001  # of one test
        self.logger.addHandler(self.handler)

    def lines(self) -> list[str]:
        """Return the lines that were written since the last call."""
        lines = self._written.getvalue().splitlines()
        self._written.truncate(0)
        self._written.seek(0)
        return lines

    def texts(self) -> list[str]:
        """Return the messages of `lines`."""
        return [line.partition("sparkis.tls: ")[2] for line in self.lines()]


@pytest.fixture
def log() -> Iterator[Log]:
    log = Log(TextFormatter())
    yield log
    log.handler.close()


def test_message_is_one_line_of_text_with_its_traceback(log: Log) -> None:
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.logger.exception("of a client: %s", "a\r\nb\x1b[1m")
    [line] = log.lines()
    assert re.match(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ERROR sparkis\.tls: of a client: a\\r\\nb\\x1b\[1m\\nTraceb", line
    )
    assert line.endswith(r"ValueError: two\nlines")


def test_message_is_one_json_object() -> None:
    log = Log(JsonFormatter("sparkis.worker.1"))
    try:
        raise ValueError("two\nlines")
    except ValueError:
        log.logger.exception("a\nb")
    [line] = log.lines()
    fields = json.loads(line)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", fields.pop("time")) and fields.pop("pid")
    assert fields.pop("exception").endswith("ValueError: two\nlines")
    assert fields == {"level": "error", "part": "sparkis.tls", "message": "a\nb", "process": "sparkis.worker.1"}


def test_repeated_lines_are_counted(log: Log) -> None:
    for _ in range(313):
        log.logger.warning("the storage of %s does not respond", "job")
    assert log.texts() == ["the storage of job does not respond"]
    log.now_s += WINDOW_S
    log.handler.report_counts()
    assert log.texts() == ["the storage of job does not respond (repeated 312 times in 10 s)"]
    log.handler.report_counts()
    assert log.texts() == []
    log.logger.warning("the storage of %s does not respond", "job")
    assert log.texts() == ["the storage of job does not respond"]


def test_next_window_writes_count_of_one_before(log: Log) -> None:
    for _ in range(3):
        log.logger.warning("a")
    log.now_s += 2 * WINDOW_S
    log.logger.warning("a")
    assert log.texts() == ["a", "a (repeated 2 times in 20 s)", "a"]


def test_other_lines_of_message_are_counted_after_some(log: Log) -> None:
    for number in range(LINES_MAX + 5):
        log.logger.info("closed %d", number)
    log.logger.info("another message")
    assert log.texts() == [*(f"closed {number}" for number in range(LINES_MAX)), "another message"]
    log.handler.close()
    assert log.texts() == [f"closed {LINES_MAX + 4} (repeated 5 times in 0 s)"]


def test_count_is_field_of_json() -> None:
    log = Log(JsonFormatter())
    for _ in range(3):
        log.logger.info("a")
    log.handler.close()
    assert [json.loads(line).get("repeated") for line in log.lines()] == [None, 2]


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("redis://user:p%40ss@host:1/0 fails", "redis://user:***@host:1/0 fails"),
        ("REDISS://:word@host", "REDISS://:***@host"),
        ("s3://id:se/cret@bucket/log", "s3://id:***@bucket/log"),
        (
            "s3://bucket/log?access_key=AKIA&region=eu&secret_key=x",
            "s3://bucket/log?access_key=***&region=eu&secret_key=***",
        ),
        ("10.0.0.1:7379 redis://host:6379", "10.0.0.1:7379 redis://host:6379"),
    ],
)
def test_secrets_in_urls_are_hidden(text: str, hidden: str) -> None:
    assert hide_secrets(text) == hidden


def test_levels_are_those_of_all_parts_and_of_some() -> None:
    assert parse_levels("warning,sparkis.tls=debug") == {"": logging.WARNING, "sparkis.tls": logging.DEBUG}
    assert parse_levels("nothing")[""] > logging.CRITICAL
    assert parse_levels("sparkis.acl=error") == {"": logging.INFO, "sparkis.acl": logging.ERROR}
    for wrong, text in (
        ("loud", "'loud' is no level; give one of debug"),
        ("sparkis.x=info", "'sparkis.x' is no part"),
    ):
        with pytest.raises(ValueError, match=text):
            parse_levels(wrong)


def test_parts_are_those_that_log() -> None:
    listed = subprocess.run(
        [
            "git",
            "grep",
            "-hoE",
            r"getLogger\([^)]+\)",
            "--",
            "state_backend/*.py*",
            "resp_server/*.py*",
            "spark_hooks/*.py*",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    found = set(re.findall(r'getLogger\("(sparkis[^"]*)"\)', listed.stdout))
    assert found == set(PARTS) and "__name__" not in listed.stdout
