"""The name of a generation's folder: `<query id>.<term>`, of the query and the term that began the generation."""

from __future__ import annotations


def folder_name(query_id: str, term: int) -> str:
    """Return the name of the generation that a query begins with a term; it is unique to the term."""
    return f"{query_id}.{term}"


def query_of(folder: str) -> str:
    """Return the query that began a generation, from its folder's name."""
    return folder.rpartition(".")[0] or folder


def first_term(folder: str) -> int | None:
    """Return the term that began a generation, from its folder's name; None if the folder is no generation."""
    query_id, _, term = folder.rpartition(".")
    return int(term) if query_id and term.isdecimal() else None
