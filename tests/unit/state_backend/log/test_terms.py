"""A term's file has the whole description of a generation."""

from __future__ import annotations

from dataclasses import fields

from state_backend.log.terms import Description
from state_backend.model.descriptor import StateDescriptor

STATE, DROPPED = StateDescriptor("s", key="k", value="v"), StateDescriptor("d", key="k", field="f", value="v")


def test_description_round_trips() -> None:
    whole = Description("job", "q", (STATE,), 3, (DROPPED,), {"states": {}}, ("s",), "before")
    assert all(getattr(whole, field.name) for field in fields(whole))
    assert Description.from_json(whole.to_json()) == whole
    least = Description("job", "q", (STATE,))
    assert Description.from_json(least.to_json()) == least
