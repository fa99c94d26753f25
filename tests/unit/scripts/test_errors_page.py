"""The page of errors: it is that of the sources, and errors that really happen are on it."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from resp_server.protocol.errors import ReplyError
from scripts import errors_page
from spark_hooks.cli import main
from sparkis import Change, ChangeError, DescriptorError, LogWriter, Op, StateDescriptor
from state_backend.model import errors

PAGE = errors_page.PAGE.read_text()
TROUBLESHOOTING = (errors_page.ROOT / "docs" / "troubleshooting.md").read_text()
LINES = [line for block in re.findall(r"```text\n(.*?)\n```", PAGE, re.DOTALL) for line in block.split("\n")]
STATE = StateDescriptor("price", key="ticker", value="price")


def is_on_the_page(text: str) -> bool:
    """Return whether a line of the page fits a text, or the end of one."""
    patterns = (".*".join(map(re.escape, line.split(errors_page.UNKNOWN))) for line in LINES)
    return any(re.search(f"(^|: ){pattern}$", text.strip(), re.DOTALL) for pattern in patterns)


def test_page_is_that_of_sources() -> None:
    assert errors_page.page() == PAGE, "run `make errors`"


def test_every_code_of_reply_is_on_page() -> None:
    codes = set(re.findall(r"^\| `([A-Z]+)` \|", PAGE, re.MULTILINE))
    assert codes == set(ReplyError.by_code)


def test_page_has_every_public_error_class_with_texts() -> None:
    used = {
        node for path in errors_page.sources() for node in re.findall(r"\braise (\w+Error)\(\s*f?\"", path.read_text())
    }
    own = {name for name in vars(errors) if name.endswith("Error")}
    assert [name for name in sorted(own & used) if f"**{name}**" not in PAGE] == []


def raised(call: Callable[[], object], error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def test_errors_that_program_raises_are_on_page(tmp_path: Path) -> None:
    long = Change("price", Op.PUT, b"market:price:" + 70_000 * b"x", value=b"1")
    with LogWriter(str(tmp_path), "market", [STATE]) as writer:
        texts = [
            raised(lambda: StateDescriptor("price", key="ticker"), DescriptorError),
            raised(lambda: StateDescriptor("a:b", key="ticker", value="price"), DescriptorError),
            raised(lambda: writer.publish([long]), ChangeError),
        ]
    assert [text for text in texts if not is_on_the_page(text)] == []


@pytest.mark.parametrize(
    "words",
    [
        ["serve", "--log", "/nowhere"],
        ["serve", "--log", "/tmp", "--upstream", "redis://localhost"],
        ["registry", "--log", "/tmp", "--bind", "0.0.0.0"],
        ["status", "--url", "http://localhost"],
        ["inspect", "/nowhere"],
        ["rename", "--log", "/nowhere", "a", "b"],
        ["drop", "--log", "/nowhere", "a"],
        ["history", "market:price:ACME", "--log", "/nowhere"],
        ["get", "/nowhere", "key"],
        ["stop", "--log", "/nowhere"],
    ],
    ids=lambda words: " ".join(words),
)
def test_errors_that_command_prints_are_on_page(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SPARKIS_CONTROL_TOKEN", raising=False)
    assert main(words) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines and [line for line in lines if not is_on_the_page(line)] == []


def test_text_that_no_source_has_is_not_on_page() -> None:
    assert not is_on_the_page("sparkis serve: the moon is made of cheese")


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise LogError(f"the log {path} is gone")', ["the log … is gone"]),
        ('raise LogError("a" + "nd so on")', ["and so on"]),
        ('TEXT = "no such thing"\nraise LogError(TEXT)', ["no such thing"]),
        ('raise LogError("it is so" if x else f"it is {x} thus")', ["it is so", "it is … thus"]),
        (
            'class XError(E):\n    def __init__(self, why="no reason at all"):\n        super().__init__(why)',
            ["no reason at all"],
        ),
        ('mistakes.add("--a and --b exclude each other")', ["--a and --b exclude each other"]),
        ('print("sparkis get: no such key", file=sys.stderr)', ["sparkis get: no such key"]),
        ("raise LogError(str(error))", []),
        ('raise TypeError("a mistake of a programmer")', []),
    ],
)
def test_error_texts_are_found_in_every_form_of_code(source: str, found: list[str]) -> None:
    assert sorted(each.text for each in errors_page.texts_of("s", ast.parse(source))) == sorted(found)


def test_page_of_symptoms_leads_to_page_of_errors() -> None:
    assert "(errors.md)" in TROUBLESHOOTING
