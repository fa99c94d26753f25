"""Declarations of readable states in pickled processors: written by `processor`, read by `declared`.

Spark 3.5 has no stateful processors. This module can be imported there, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

# The text before a declaration. The declaration is JSON in ASCII: a list of the arguments of AttachedStates.
MARKER = "sparkis.queryable_processor:"
# A local property of tasks. If a query's declarations are invalid, it has the error that the query's processors raise.
REFUSAL_PROPERTY = "sparkis.refusal"


def processor_states(pickled: bytes) -> Iterable[dict[str, Any]]:
    """Return the declaration in a pickled processor; empty if there is none.

    The bytes are searched for the text, because unpickling them would run the user's code. Pickle never splits a text.
    """
    marker, decoder = MARKER.encode(), json.JSONDecoder()
    at = pickled.find(marker)
    while at >= 0:
        begin = at + len(marker)
        try:
            found, _ = decoder.raw_decode(pickled[begin:].decode("ascii", "replace"))
        except ValueError:  # the marker alone: the constant of this module, if the module is pickled by value
            at = pickled.find(marker, begin)
        else:
            return list(found)
    return ()
