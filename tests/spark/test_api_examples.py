"""The example of every public name runs as its docstring shows it, and prints what it shows there."""

from __future__ import annotations

import doctest
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import sparkis

FINDER = doctest.DocTestFinder(recurse=False)


def has_to_show_how(name: str) -> bool:
    """Return whether a public name has to have an example: all but errors, and lists of choices."""
    named = getattr(sparkis, name)
    return not (inspect.isclass(named) and issubclass(named, Exception | Enum))


# These are made by others, whose examples show them.
SHOWN_ELSEWHERE = {"Attachment": "attach", "ServedEndpoint": "serve", "QueryableProcessor": "queryable_processor"}
NAMES = [name for name in sparkis.__all__ if has_to_show_how(name) and name not in SHOWN_ELSEWHERE]


def examples_of(name: str, names: dict[str, Any] | None = None) -> doctest.DocTest:
    (found,) = FINDER.find(getattr(sparkis, name), f"sparkis.{name}", globs=names or {})
    return found


@pytest.fixture
def settings_as_before(spark: SparkSession) -> Iterator[None]:
    """Take back what an example sets in the session."""
    before = dict(spark.conf.getAll)
    yield
    for query in spark.streams.active:
        query.stop()
    after = dict(spark.conf.getAll)
    for name in after.keys() - before.keys():
        spark.conf.unset(name)
    for name, value in before.items():
        if after[name] != value:
            spark.conf.set(name, value)


@pytest.mark.usefixtures("settings_as_before")
@pytest.mark.parametrize("name", NAMES)
def test_example_of_api_page_has_shown_output(name: str, spark: SparkSession, tmp_path: Path) -> None:
    # What the page about the API says that there is. Spark's workers can import no test, so all is of `__main__`.
    names = {"sparkis": sparkis, "spark": spark, "path": str(tmp_path), "__name__": "__main__"}
    examples = examples_of(name, names)
    assert examples.examples, f"sparkis.{name} has no example"
    said: list[str] = []
    doctest.DocTestRunner(verbose=False).run(examples, out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", sparkis.__all__)
def test_every_public_name_has_docstring(name: str) -> None:
    documented = inspect.getdoc(getattr(sparkis, name))
    assert documented and documented.splitlines()[0].endswith(".")


@pytest.mark.parametrize(("name", "maker"), SHOWN_ELSEWHERE.items())
def test_type_without_example_is_shown_in_that_of_its_function(name: str, maker: str) -> None:
    hints = inspect.signature(getattr(sparkis, maker)).return_annotation
    assert hints == name
    assert examples_of(maker).examples


def test_every_argument_of_public_function_is_described() -> None:
    undescribed = []
    for name in sparkis.__all__:
        named = getattr(sparkis, name)
        if inspect.isfunction(named) or name in ("AttachedState", "LogWriter", "StateDescriptor"):
            arguments = (inspect.getdoc(named) or "").partition("\nArgs:\n")[2].partition("\n\n")[0].splitlines()
            described = {line.strip().partition(":")[0].lstrip("*") for line in arguments if line[4:5] != " "}
            undescribed += [f"{name}({each}=)" for each in described ^ set(inspect.signature(named).parameters)]
    assert undescribed == []
