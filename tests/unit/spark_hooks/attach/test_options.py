"""The options of `sparkis attach`: jobs of checkpoints, and states."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from spark_hooks.attach.options import states_of
from spark_hooks.cli import COMMANDS
from state_backend.attach.states import AttachedState
from state_backend.model.errors import DescriptorError


def parse(*words: object) -> argparse.Namespace:
    (command,) = (each for each in COMMANDS if each.name == "attach")
    return command.parser().parse_args(["--checkpoint", "/c/one", *map(str, words)])


def test_options_without_state_are_for_each_state() -> None:
    (each,) = states_of(parse("--on-bad-key", "fail", "--json-decimals", "text"))
    assert (each.is_for_all, each.on_bad_key, each.json_decimals) == (True, "fail", "text")
    (single,) = states_of(parse("--key", "a", "b", "--separator", "|"))
    assert single == AttachedState(key=["a", "b"], separator="|")


def test_decimals_of_json_are_option_beside_columns_and_in_file(tmp_path: Path) -> None:
    columns = {"mean": "avg(v)"}
    (single,) = states_of(parse("--column", "mean=avg(v)", "--json-decimals", "text"))
    assert single == AttachedState(columns=columns, json_decimals="text")
    file = tmp_path / "states.toml"
    file.write_text('[[state]]\noperator = 0\n[[state]]\noperator = 1\njson-decimals = "number"\n')
    assert states_of(parse("--states", file, "--json-decimals", "text")) == [
        AttachedState(operator=0, json_decimals="text"),
        AttachedState(operator=1, json_decimals="number"),
    ]


def test_file_has_options_of_several_states(tmp_path: Path) -> None:
    file = tmp_path / "states.toml"
    file.write_text(
        """
        [[state]]
        name = "mean"
        operator = 0
        columns = {mean = "avg(v)"}

        [[state]]
        operator = 1
        key-format = "seen/<k>"
        on-bad-key = "fail"
        """
    )
    assert states_of(parse("--states", file)) == [
        AttachedState("mean", operator=0, columns={"mean": "avg(v)"}),
        AttachedState(operator=1, key_format="seen/<k>", on_bad_key="fail"),
    ]
    with pytest.raises(DescriptorError, match="describes all states; leave out --operator"):
        states_of(parse("--states", file, "--operator", 1))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", r"has no table \[\[state\]\]"),
        ("[[state]]\nkind_of = 1", "kind_of is no option of a state; the options are name, operator"),
        ("[[state", "states.toml: "),
        (None, "No such file"),
    ],
)
def test_unreadable_file_of_states_is_error_with_its_name(tmp_path: Path, text: str | None, error: str) -> None:
    if text is not None:
        (tmp_path / "states.toml").write_text(text)
    with pytest.raises(DescriptorError, match=error):
        states_of(parse("--states", tmp_path / "states.toml"))
