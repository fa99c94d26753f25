"""`sparkis.queryable_processor` before Spark sees it: what it refuses, and how the declaration lies in its bytes."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.sql.streaming.stateful_processor import StatefulProcessor, StatefulProcessorHandle

from spark_hooks.attach.declaration import MARKER, processor_states
from spark_hooks.attach.declared import states_of
from spark_hooks.attach.processor import queryable_processor
from sparkis import AttachedState
from state_backend.model.errors import DescriptorError


class Plain(StatefulProcessor):
    """Keeps nothing."""

    note = ""

    def init(self, handle: StatefulProcessorHandle) -> None:
        """Make no variable."""

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Any]:
        return iter(())


@pytest.mark.parametrize("protocol", range(pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("padding", [0, 65_300, 65_500, 200_000])
def test_declaration_is_found_anywhere_in_pickled_bytes(padding: int, protocol: int):
    described = AttachedState(variable="b", kind="value", columns={"ä": "concat(x, '\"}')"}, length_max=3)
    made = queryable_processor(Plain(), states={"a": "x", "Zahl-ü": described})
    command = ("x" * padding, made, {"returns": "k string"})
    plain, full = processor_states(cloudpickle.dumps(command, protocol))
    assert AttachedState(**plain) == AttachedState("a", variable="x")
    assert AttachedState(**full) == AttachedState(
        "Zahl-ü", variable="b", kind="value", columns={"ä": "concat(x, '\"}')"}, length_max=3
    )


def test_processor_with_mark_but_no_declaration_has_none():
    processor = Plain()
    processor.note = MARKER
    assert processor_states(cloudpickle.dumps(processor)) == ()
    made = queryable_processor(processor, states={"a": "x"})
    assert [each["variable"] for each in processor_states(cloudpickle.dumps((processor, made)))] == ["x"]


def test_unpickled_processor_has_its_declaration():
    made = queryable_processor(Plain(), states={"a": "x"})
    again = pickle.loads(cloudpickle.dumps(made))
    assert processor_states(cloudpickle.dumps(again)) == processor_states(cloudpickle.dumps(made)) != ()


def test_processor_itself_does_all_work():
    called = []
    work = [name for name in vars(StatefulProcessor) if not name.startswith("_")]

    class Recording(Plain):
        def __getattribute__(self, name: str) -> Any:
            if name not in work:
                return super().__getattribute__(name)
            return lambda *given: called.append((name, given))

    made = queryable_processor(Recording(), states={"a": "x"})
    for name in work:
        count = len(inspect.signature(getattr(StatefulProcessor, name)).parameters) - 1
        getattr(made, name)(*range(count))
        assert called.pop() == (name, tuple(range(count)))
    assert len(work) >= 5
    assert not called


@pytest.mark.parametrize(
    ("processor", "states", "message"),
    [
        (Plain, {"a": "x"}, "takes an instance of a StatefulProcessor"),
        (queryable_processor(Plain(), states={"a": "x"}), {"b": "y"}, "declared its states already"),
        (Plain(), {}, "maps names of states to variables"),
        (Plain(), ["x"], "maps names of states to variables"),
        (Plain(), {"a:b": "x"}, "state name 'a:b' may not contain"),
        (Plain(), {"a": 1}, "state 'a': give the name of a variable of the processor"),
        (Plain(), {"a": ""}, "state 'a': give the name of a variable of the processor"),
        (Plain(), {"a": AttachedState(key="k")}, "state 'a': give the name of a variable of the processor"),
        (Plain(), {"a": AttachedState("b", variable="x")}, "state 'a' has another name in its AttachedState, 'b'"),
        (Plain(), {"a": AttachedState(variable="x", operator=0)}, "leave out operator="),
        (Plain(), {"a": AttachedState(variable="x", value=(b"v",))}, "not JSON serializable"),
    ],
)
def test_processor_without_declared_states_is_refused_at_once(processor: Any, states: Any, message: str):
    with pytest.raises(DescriptorError, match=message):
        queryable_processor(processor, states=states)


def test_worker_that_unpickles_processor_loads_nothing_else_of_hooks():
    code = "import sys, spark_hooks.attach.processor; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    hooks = {name for name in loaded if name.startswith("spark_hooks")}
    own = {"spark_hooks.attach.declaration", "spark_hooks.attach.processor"}
    assert hooks == {"spark_hooks", "spark_hooks.attach", *own}


class Node:
    """A node of a query's plan, as py4j shows it, with the nodes below it."""

    def __init__(self, name: str, *below: Node) -> None:
        self._name = name
        self._below = below

    def nodeName(self) -> str:
        return self._name

    def children(self) -> Node:
        return self

    def size(self) -> int:
        return len(self._below)

    def apply(self, index: int) -> Node:
        return self._below[index]

    def streamingQuery(self) -> Node:
        return self

    def analyzedPlan(self) -> Node:
        return self


def test_unknown_operator_is_warned_of_by_name(
    caplog: pytest.LogCaptureFixture,
):
    plan = Node("Project", Node("TransformWithStateInR", Node("TransformWithState", Node("StreamingRelation"))))
    assert states_of(SimpleNamespace(name="q", _jsq=plan)) == []  # type: ignore[arg-type]
    (record,) = caplog.records
    assert "the operator TransformWithStateInR, which this version of sparkis does not know" in record.getMessage()
