"""What a page is: its place in the menu, the facts that it needs, and the function that reads what it shows."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from sparkis_ui.polling import Hub
from sparkis_ui.text import Query


@dataclass(frozen=True)
class View:
    """One look at a page: the hub of the user, and the parameters of the URL."""

    hub: Hub
    query: Query


@dataclass(frozen=True)
class Page:
    """A page. read: returns what its template shows. groups: of facts (`polling.TURNS`). is_live: moves by itself.

    follows_changes: it is sent again at each change of a watched key, too. key: of the keyboard.
    """

    name: str
    title: str
    read: Callable[[View], Awaitable[dict[str, Any]]]
    groups: tuple[str, ...] = ()
    is_live: bool = True
    follows_changes: bool = False
    key: str = ""

    @property
    def path(self) -> str:
        """The page's path."""
        return f"/{self.name}"
