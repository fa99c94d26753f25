"""The first rules file of a swap: all keys stay where they are, and each state has a rule to be changed. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cmp_to_key

from resp_server.backends.routing.format_patterns import covers
from resp_server.backends.routing.key_analysis import AnalyzedKeys, printable
from state_backend.model.descriptor import KeyFormat

HEAD = """\
# Rules of a swap, for `sparkis proxy --routes`. The first rule that covers a key decides.
#
# As long as owner is "upstream", clients get what they get today. Change one rule at a time, then `sparkis reload`:
#   owner = "shadow"     as "upstream", and the replies are compared with the state's: see `sparkis shadow`
#   owner = "state"      the state answers. While a program still writes the keys through the proxy, also
#                        writes = "pass" (the upstream keeps a copy), or writes = "drop"
# A rule whose owner is "state" for good can be removed: the states own their keys without rules.
"""
EXAMPLES_SHOWN = 2


def first_rules(rows: Sequence[AnalyzedKeys]) -> str:
    """Return the text of a rules file, with a rule for each state whose keys the upstream has."""
    copied = [row for row in rows if row.state is not None and row.rule is None and row.count]
    written, rules = list[KeyFormat](), [HEAD]
    for row in sorted(copied, key=cmp_to_key(_narrow_first)):
        keys = KeyFormat.parse(row.keys)
        if "*" in row.keys:
            rules.append(f"# {row.keys}: a rule cannot have a '*' in its keys. The state owns these keys.\n")
        elif not any(covers(each, keys) for each in written):  # a rule for the same keys would never apply
            written.append(keys)
            rules.append(_rule(row))
    return "\n".join(rules)


def _rule(row: AnalyzedKeys) -> str:
    assert row.state is not None
    examples = ", ".join(printable(sample.name) for sample in row.samples[:EXAMPLES_SHOWN])
    keys = "1 key" if row.count == 1 else f"{row.count:,} keys"
    lines = [f"{row.state.name} would answer {keys} of the upstream, such as {examples}"]
    if row.other_types:
        lines.append(f"Look first: some are of the type {', '.join(row.other_types)}, the state's are {row.state.type}")
    if row.absent:
        lines.append(f"Look first: the state does not have {row.absent} of {row.compared} that were looked for")
    text = "".join(f"# {line}.\n" for line in lines)
    return f'{text}[[rule]]\nkeys = {_quoted(row.keys)}\nowner = "upstream"\n'


def _narrow_first(one: AnalyzedKeys, other: AnalyzedKeys) -> int:
    """Order a rule before those that cover it, and otherwise by the text."""
    first, second = KeyFormat.parse(one.keys), KeyFormat.parse(other.keys)
    if covers(first, second) != covers(second, first):
        return -1 if covers(second, first) else 1
    return (one.keys > other.keys) - (one.keys < other.keys)


def _quoted(text: str) -> str:
    """Return a string of TOML, whose escapes are those of JSON, and one more."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")
