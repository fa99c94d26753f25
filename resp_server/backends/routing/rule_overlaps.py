"""Rules that share some of their keys. For a shared key, the first rule in the file counts. Pure.

Two formats with placeholders share keys if one's beginning begins the other's, and one's end ends the other's: each
placeholder matches any text. If one covers the other, the narrower one comes first on purpose, or the
file is refused.
"""

from __future__ import annotations

import re
from itertools import combinations, islice

from resp_server.backends.routing.format_patterns import covers, key_pattern
from resp_server.backends.routing.rules import Rules
from state_backend.model.descriptor import KeyFormat

# The warnings of one file.
OVERLAPS_MAX = 20


def overlaps(rules: Rules) -> list[str]:
    """Return a sentence for each pair of rules that share some keys, at most `OVERLAPS_MAX`."""
    pairs = (
        (first, second, key)
        for first, second in combinations(rules, 2)
        if first.database == second.database and (key := shared_key(first.keys, second.keys)) is not None
    )
    found = (pair for pair in pairs if not covers(pair[1].keys, pair[0].keys))
    return [
        f"rules '{first.name}' and '{second.name}' have keys in common, such as '{key}': '{first.name}' decides about "
        "them, because it comes first"
        for first, second, key in islice(found, OVERLAPS_MAX)
    ]


def shared_key(first: KeyFormat, second: KeyFormat) -> str | None:
    """Return a key that both formats match; None if there is none."""
    if not first.columns or not second.columns:
        return None  # one covers the other, or they share no key
    starts, ends = (
        sorted((first.literals[0], second.literals[0]), key=len),
        sorted((first.literals[-1], second.literals[-1]), key=len),
    )
    if not starts[1].startswith(starts[0]) or not ends[1].endswith(ends[0]):
        return None
    middle = [text for each in (first, second) for text in each.literals[1:-1]]
    key = "x".join([starts[1], *middle, ends[1]])
    is_shared = all(re.match(key_pattern(each), key.encode(), re.DOTALL) for each in (first, second))
    return key if is_shared else None
