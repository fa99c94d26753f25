"""Check that the targets of all links of the built site exist: pages, and anchors on them.

    python scripts/site_links.py build/site

Zensical checks the links of the Markdown pages only. This script also checks links that come from docstrings and from
the site's theme.
"""

from __future__ import annotations

import sys
import tomllib
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

CONFIG = Path(__file__).parents[1] / "zensical.toml"


class Page(HTMLParser):
    """The links of a page, and its anchors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: set[str] = set()
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if value is not None and name in ("href", "src"):
                self.links.add(value)
            elif value is not None and name in ("id", "name"):
                self.anchors.add(value)


def broken(site: Path, base: str) -> list[str]:
    """Return a line for each broken link within the site. base: the path of the site's URL."""
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    found = []
    for path, page in sorted(pages.items()):
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path
            if parts.path.startswith("/"):
                target = site / unquote(parts.path).removeprefix(base)
            elif parts.path:
                target = (path.parent / unquote(parts.path)).resolve()
            if target.is_dir():
                target = target / "index.html"
            if not target.exists():
                found.append(f"{path.relative_to(site)}: {link}: the file does not exist")
            elif target in pages and parts.fragment and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{path.relative_to(site)}: {link}: the page has no such anchor")
    return found


def main(site: Path) -> int:
    """Print the broken links; return the exit code."""
    url: str = tomllib.loads(CONFIG.read_text())["project"]["site_url"]
    found = broken(site.resolve(), urlsplit(url).path)
    print(*found, sep="\n", end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
