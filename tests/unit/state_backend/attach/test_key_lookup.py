"""`sparkis get` shows the columns and texts that an attachment to the same checkpoint serves.

Both are compared in one form: objects whose values are texts, as `value_of_get` and `value_of_attachment` return them.
test_get_command.py has whole examples of what `get` prints.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spark_hooks.cli import main
from state_backend.apply.replay import read_snapshot
from state_backend.attach.key_lookup import indented
from state_backend.attach.start import attach_files
from state_backend.history.whole_values import whole_value
from state_backend.model.descriptor import Encoding, StateDescriptor
from state_backend.store.store import KeyInfo, Snapshot
from tests.golden_checkpoints import NEWEST, unpack

KEYS_MAX = 4


def get(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    code = main(["get", *map(str, arguments)])
    output, errors = capsys.readouterr()
    assert (code, errors) == (0, "")
    found: dict[str, Any] = json.loads(output, parse_int=str, parse_float=str)
    return found


def as_text(value: Any) -> str:
    """Return a value of parsed JSON, whose numbers are texts, as an attachment has it alone."""
    if isinstance(value, str):
        return value
    return str(value).lower() if isinstance(value, bool) else json.dumps(value)


def value_of_attachment(snapshot: Snapshot, info: KeyInfo, state: StateDescriptor) -> Any:
    """Return the value of a key in an attachment's snapshot, in the form for comparisons."""

    def value_of(content: bytes) -> dict[str, str]:
        if state.encoding is Encoding.JSON:
            loaded = json.loads(content, parse_int=str, parse_float=str)
            return {name: as_text(each) for name, each in loaded.items() if each is not None}
        text = content.decode(errors="replace")
        return {state.value[0]: json.dumps(json.loads(text, parse_int=str, parse_float=str)) if is_json(text) else text}

    found = whole_value(snapshot, info)
    if isinstance(found, bytes):
        return value_of(found)
    if isinstance(found, list):
        return [value_of(each) for each in found if isinstance(each, bytes)]
    if state.field is not None:
        return {name.decode(): value_of(each) for name, each in found.items()}
    return {name.decode(): normalized(each.decode(errors="replace")) for name, each in found.items()}


def is_json(text: str) -> bool:
    return text[:1] in ("{", "[")


def normalized(text: str) -> str:
    return json.dumps(json.loads(text, parse_int=str, parse_float=str)) if is_json(text) else text


def value_of_get(found: Any, state: StateDescriptor) -> Any:
    """Return what `get` prints of a state, in the form for comparisons."""
    if isinstance(found, list):
        return [value_of_get(each, state) for each in found]
    if state.field is not None:
        return {
            name: {each: as_text(value) for each, value in row.items() if value is not None}
            for name, row in found.items()
        }
    return {name: as_text(value) for name, value in found.items() if value is not None}


@pytest.mark.parametrize(
    "job",
    [
        "hdfs-types",
        "hdfs-aggregation",
        "hdfs-window",
        "hdfs-not-utf8",
        "transform-snapshots",
        "hdfs-sessions",
        "hdfs-dedupe",
        "hdfs-dedupe-within",
        "hdfs-join",
        "transform-ttl",
        "hdfs-grouped",
    ],
)
def test_key_has_columns_and_texts_of_attachment(job: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, log = unpack(NEWEST, job, tmp_path / "checkpoint"), str(tmp_path / "log")
    attachment = attach_files(str(folder), job="j", log=log)
    assert attachment.wait(timeout_s=60)
    attachment.stop()
    states = {state.name: state for state in attachment.states}
    with read_snapshot(log, "j") as snapshot:
        _, keys = snapshot.scan(0, 1000)
        for info in [found for key in sorted(keys)[:KEYS_MAX] if (found := snapshot.key_info(key)) is not None]:
            state = states[info.state]
            key = info.key.removeprefix(f"j:{state.name}:".encode()).decode(errors="surrogateescape")
            found = get(capsys, folder, key, "--state", state.name)
            assert value_of_get(found[state.name], state) == value_of_attachment(snapshot, info, state), info.key


def test_columns_name_functions_of_query(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = unpack(NEWEST, "hdfs-window", tmp_path)
    key, column = "2024-03-01T10:40:00Z:left", "double=2 * sum"
    assert get(capsys, folder, key, "--column", column) == {"aggregation": {"double": "102"}}
    assert main(["get", str(folder), key, "--column", "double"]) == 1
    assert "--column takes NAME=VALUE, not 'double'" in capsys.readouterr().err
    assert main(["get", str(folder), key, "--column", "x=nothing"]) == 1
    assert "there is no such column; the columns are" in capsys.readouterr().err


def test_numbers_keep_their_texts_in_lines() -> None:
    document = '{"a":1e+300,"b":[],"c":{},"d":["x\\"{,",0.0000001]}'
    assert indented({"s": document}).splitlines() == [
        "{",
        ' "s": {',
        '  "a": 1e+300,',
        '  "b": [],',
        '  "c": {},',
        '  "d": [',
        '   "x\\"{,",',
        "   0.0000001",
        "  ]",
        " }",
        "}",
    ]
