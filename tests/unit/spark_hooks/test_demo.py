"""What the demo prints about where its state and its page are."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from spark_hooks.demo import Screen


class Endpoint(NamedTuple):
    """An endpoint at an address."""

    url: str
    port: int


@pytest.mark.parametrize(
    ("page_url", "line"),
    [
        ("http://127.0.0.1:7380", "page   http://127.0.0.1:7380  shows it in the browser, live"),
        ("", "page   did not start: the log says why; --ui-port takes another port"),
        (None, None),
    ],
)
def test_demo_prints_where_its_page_is_or_that_it_failed(
    page_url: str | None, line: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    screen = Screen(io.StringIO(), Path("demo.log"))
    screen.show_endpoint(Endpoint("redis://127.0.0.1:7379", 7379), page_url)  # type: ignore[arg-type]
    found = re.search("^page.*$", capsys.readouterr().out, re.MULTILINE)
    assert (found and found[0]) == line
