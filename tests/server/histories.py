"""The processes that read histories."""

from __future__ import annotations

from compat.processes import children_of


def readers_of(process: int) -> set[int]:
    """Return the child processes of a process that read histories."""
    return {child for child, line in children_of(process).items() if b"history_reader" in line}
