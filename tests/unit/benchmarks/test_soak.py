"""Endless growth is distinguished from growth that goes up and down."""

from __future__ import annotations

import pytest

from benchmarks.soak import FLAT_AFTER_S, MIB, Sample, SoakError, _check_growth, _check_sizes


def test_leak_is_reported_as_growth() -> None:
    with pytest.raises(SoakError, match=r"the change log grows: 7[0-9]\.\d MiB in the middle third"):
        _check_growth("log", "change log", [number * MIB // 2 for number in range(300)])


def test_warm_up_and_sawtooth_are_not_growth() -> None:
    warm_up = [number * MIB for number in range(100)]
    saw = [(100 + number % 40) * MIB for number in range(200)]
    _check_growth("store", "store's file", warm_up + saw)
    _check_growth("heap", "heap", [])


def test_short_run_has_no_verdict_about_growth() -> None:
    samples = [Sample(float(at), at, at * MIB, at * MIB, 0, {"server": 0}, {}) for at in range(100)]
    _check_sizes(samples, FLAT_AFTER_S - 1)
    with pytest.raises(SoakError, match="the store's file grows"):
        _check_sizes(samples, FLAT_AFTER_S)
