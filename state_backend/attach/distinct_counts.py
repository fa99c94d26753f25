"""The result of Spark's `approx_count_distinct`: HyperLogLog++ over the registers of a state.

A buffer is a column of int64, `MS[0]`, `MS[1]` ...; each number holds ten registers of six bits. With the
default error there are 52 buffers, for 512 registers. The result is that of Spark's `HyperLogLogPlusPlusHelper.query`.
`scripts/hyperloglog_tables.py` writes Spark's tables into `hyperloglog.json`.
"""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt

REGISTER_BITS = 6
REGISTERS_PER_WORD = 10
PRECISION_MIN = 4
# Spark has no bias tables from this precision on.
PRECISION_WITHOUT_TABLES = 19
PRECISION_MAX = 30
# The number of estimates in the table whose biases are averaged.
NEIGHBOURS = 6
# By precision; `_` in the formula of all larger precisions.
ALPHAS = {4: 0.673, 5: 0.697, 6: 0.709}

Floats = npt.NDArray[np.float64]
Words = npt.NDArray[np.int64]


def precision_of(words: int) -> int | None:
    """Return the HyperLogLog precision whose registers fill so many 64-bit buffers; None for any other number."""
    precisions = range(PRECISION_MIN, PRECISION_MAX + 1)
    return next((precision for precision in precisions if (1 << precision) // REGISTERS_PER_WORD + 1 == words), None)


def distinct_counts(words: Words) -> Words:
    """Return the estimate of each row of buffers."""
    precision = precision_of(words.shape[1])
    if precision is None:
        raise TypeError(f"approx_count_distinct never has {words.shape[1]} buffers")
    registers = 1 << precision
    shifts = np.arange(REGISTERS_PER_WORD, dtype=np.int64) * REGISTER_BITS
    parts = words[:, :, np.newaxis] >> shifts & ((1 << REGISTER_BITS) - 1)
    ranks = parts.reshape(len(words), words.shape[1] * REGISTERS_PER_WORD)[:, :registers]
    zeros = (ranks == 0).sum(axis=1)
    alpha = ALPHAS.get(precision, 0.7213 / (1.0 + 1.079 / registers))
    raw = alpha * registers * registers / np.ldexp(1.0, -ranks).sum(axis=1)
    with np.errstate(divide="ignore"):
        linear = registers * np.log(registers / zeros)
    has_tables = precision < PRECISION_WITHOUT_TABLES
    corrected = np.where(raw < 5.0 * registers, raw - _biases(precision, raw), raw) if has_tables else raw
    threshold = _tables()["thresholds"][precision - PRECISION_MIN] if has_tables else -np.inf
    is_linear = (zeros > 0) & ((linear <= threshold) | (raw <= 2.5 * registers))
    estimates: Words = np.floor(np.where(is_linear, linear, corrected) + 0.5).astype(np.int64)  # as Java rounds
    return estimates


def _biases(precision: int, raw: Floats) -> Floats:
    """Return the mean bias of the estimates in the table that are nearest to each estimate."""
    estimates = np.array(_tables()["estimates"][precision - PRECISION_MIN])
    biases = np.array(_tables()["biases"][precision - PRECISION_MIN])
    count = len(estimates)
    low = np.maximum(np.searchsorted(estimates, raw) - NEIGHBOURS + 1, 0)
    high = np.minimum(low + NEIGHBOURS, count)
    while True:
        next_distance = np.abs(raw - estimates[np.minimum(high, count - 1)])
        is_nearer = (high < count) & (next_distance < np.abs(raw - estimates[np.minimum(low, count - 1)]))
        if not is_nearer.any():
            break
        low, high = low + is_nearer, high + is_nearer
    sums = np.zeros(len(raw))
    for offset in range(NEIGHBOURS):  # in Spark's order: sums of floats depend on it
        at = low + offset
        sums += np.where(at < high, biases[np.minimum(at, count - 1)], 0.0)
    means: Floats = sums / (high - low)
    return means


@cache
def _tables() -> dict[str, Any]:
    """Return Spark's tables, by precision from PRECISION_MIN on."""
    found: dict[str, Any] = json.loads(files("state_backend.attach").joinpath("hyperloglog.json").read_text("utf-8"))
    return found
