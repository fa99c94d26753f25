"""Browse: search for keys by job, state and pattern, with steps of SCAN and nothing else."""

from __future__ import annotations

from typing import Any

from sparkis_ui.client import RequestError
from sparkis_ui.facts import Job
from sparkis_ui.page import Page, PageRequest
from sparkis_ui.pages.cluster import masters
from sparkis_ui.values import Keys, read_keys

PLACEHOLDER = "*"


async def read(request: PageRequest) -> dict[str, Any]:
    """Return the values of the page's template."""
    query, jobs = request.query, request.hub.facts.jobs
    job, state = query.text("job"), query.text("state")
    pattern = query.raw("pattern") or pattern_of(jobs, job, state).encode("utf-8", "surrogateescape")
    found, error = Keys([], "", 0), ""
    try:
        found = await read_keys(request.hub.client, pattern, query.text("cursor"), await masters(request.hub))
    except RequestError as refusal:
        error = str(refusal)
    states = next((each.states for each in jobs if each.name == job), ())
    return {
        "jobs": jobs,
        "job": job,
        "state": state,
        "states": states,
        "pattern": pattern,
        "given": query.raw("pattern"),
        "found": found,
        "cursor": query.text("cursor"),
        "error": error,
    }


def pattern_of(jobs: list[Job], job: str, state: str) -> str:
    """Return the pattern of a job's keys, or of a state's, from their key formats."""
    for each in jobs:
        if each.name == job:
            formats = [key for name, key in zip(each.states, each.key_formats, strict=False) if state in ("", name)]
            prefixes = {_glob(key) for key in formats}
            return prefixes.pop() if len(prefixes) == 1 else f"{_escaped(job)}:*"
    return "*"


def _glob(key_format: str) -> str:
    """Return the glob of a key format: `plane/<tailnum>` becomes `plane/*`."""
    literal, is_column, text = "", False, ""
    for character in key_format:
        if character == "<":
            is_column, text = True, text + _escaped(literal) + PLACEHOLDER
            literal = ""
        elif character == ">" and is_column:
            is_column = False
        elif not is_column:
            literal += character
    return text + _escaped(literal)


def _escaped(text: str) -> str:
    return "".join(f"\\{each}" if each in "*?[]\\" else each for each in text)


PAGE = Page("browse", "Browse", read, is_live=False, key="2")
