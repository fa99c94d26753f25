"""Write the pages of the site: the repository's Markdown files, with links that work on the site.

    python scripts/pages.py build/pages

Pages have the same paths on the site as in the repository, except for README.md, which is the index. So a link to a
page stays as it is. A link to another file becomes a link to that file on GitHub. A link to a missing file or heading
is an error, which names the page and the line.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md", "docs/**/*.md")
PICTURES = ("*.svg", "*.png")
INDEX = "index.md"

FENCE = re.compile(r"^ *(```|~~~)")
LINK = re.compile(r"(\]\()([^)\s]+)(\))")
HEADING = re.compile(r"^#+ +(.+?)(?: +#+)?$")
CODE_TEXT = re.compile(r"`[^`]*`")
# Characters that GitHub removes from a heading for its anchor: all but letters, digits, spaces, - and _.
NOT_IN_ANCHORS = re.compile(r"[^\w\- ]")


class LinkError(Exception):
    """The target of a link does not exist."""


def main(target: Path) -> None:
    """Delete a folder, and write all pages and pictures into it."""
    shutil.rmtree(target, ignore_errors=True)
    pages = dict(all_pages())
    for source, text in pages.items():
        path = target / page_of(source)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(for_site(source, text, pages))
    for picture in (path for names in PICTURES for path in (ROOT / "docs").rglob(names)):
        path = target / picture.relative_to(ROOT)
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(picture, path)


def all_pages() -> Iterator[tuple[str, str]]:
    """Yield (path in the repository, text) of each page."""
    for pattern in PAGES:
        for path in sorted(ROOT.glob(pattern)):
            yield path.relative_to(ROOT).as_posix(), path.read_text()


def page_of(source: str) -> str:
    """Return the path of a page on the site."""
    return INDEX if source == "README.md" else source


def for_site(source: str, text: str, pages: dict[str, str]) -> str:
    """Return a page's text with links and tables as the site needs them; LinkError for a broken link."""
    lines = []
    for number, (line, is_code) in enumerate(lines_of(text), 1):
        try:
            if not is_code and line.startswith("|"):  # GitHub needs a backslash before |; the site would show it
                line = CODE_TEXT.sub(lambda code: code[0].replace("\\|", "|"), line)
            lines.append(line if is_code else LINK.sub(lambda found: _linked(source, found, pages), line))
        except LinkError as error:
            raise LinkError(f"{source}:{number}: {error}") from None
    return "\n".join(lines)


def lines_of(text: str) -> Iterator[tuple[str, bool]]:
    """Yield (line, whether it is code) of each line of a page."""
    fence = ""
    for line in text.split("\n"):
        found = FENCE.match(line)
        if found and not fence:
            fence = found[1]
            yield line, True
        elif found and found[1] == fence:
            fence = ""
            yield line, True
        else:
            yield line, bool(fence)


def anchors_of(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found: set[str] = set()
    for line, is_code in lines_of(text):
        if not is_code and (heading := HEADING.match(line)):
            title = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading[1])
            found.add(NOT_IN_ANCHORS.sub("", title.lower()).replace(" ", "-"))
    return found


def _linked(source: str, found: re.Match[str], pages: dict[str, str]) -> str:
    link = found[2]
    if link.startswith(("https://", "http://", "mailto:")):
        return found[0]
    path, _, anchor = link.partition("#")
    there = (ROOT / source).parent / path if path else ROOT / source
    if not there.exists():
        raise LinkError(f"there is no file {path}")
    target = there.resolve().relative_to(ROOT).as_posix()
    if anchor and anchor not in anchors_of(pages.get(target, "")):
        raise LinkError(f"{target} has no heading #{anchor}")
    if target in pages:
        relative = relpath(page_of(target), Path(page_of(source)).parent) if path else ""
        link = relative + (f"#{anchor}" if anchor else "")
    elif not any(map(there.match, PICTURES)):
        link = f"{repository()}/{'tree' if there.is_dir() else 'blob'}/main/{target}"
    return found[1] + link + found[3]


def repository() -> str:
    """Return the URL of the repository."""
    url: str = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
    return url


if __name__ == "__main__":
    main(Path(sys.argv[1]))
