"""How many random examples a test tries: the number that it gives, times `SPARKIS_EXAMPLES`."""

from __future__ import annotations

import os

# `make test-slow` sets it.
EXAMPLES_VARIABLE = "SPARKIS_EXAMPLES"


def factor() -> int:
    """Return the factor for the number of examples."""
    return int(os.environ.get(EXAMPLES_VARIABLE, "1"))


def examples(count: int) -> int:
    """Return the number of examples of a test that tries `count` by default."""
    return count * factor()
