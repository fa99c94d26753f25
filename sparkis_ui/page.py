"""A page: its place in the menu, the facts that it needs, and the function that reads its data."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sparkis_ui.polling import Hub
from sparkis_ui.text import Query


@dataclass(frozen=True)
class PageRequest:
    """A request for a page: the hub of the user, and the parameters of the URL."""

    hub: Hub
    query: Query


@dataclass(frozen=True)
class Page:
    """A page.

    Args:
        read: Returns the names for its template.
        groups: Its groups of facts (`polling.TURNS`).
        is_live: Open pages are updated.
        follows_changes: Also at each change of a watched key.
        key: The key of the keyboard that opens the page.
    """

    name: str
    title: str
    read: Callable[[PageRequest], Awaitable[dict[str, Any]]]
    groups: tuple[str, ...] = ()
    is_live: bool = True
    follows_changes: bool = False
    key: str = ""

    @property
    def path(self) -> str:
        """The page's path."""
        return f"/{self.name}"
