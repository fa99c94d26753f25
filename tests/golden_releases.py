"""Golden folders of released versions. `scripts/golden_release.py` makes them, and lists their content."""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from state_backend.log.checked_json import with_checksum
from state_backend.log.epochs import NEWEST_FORMAT
from tests.golden_checkpoints import GOLDEN

RELEASES = sorted(path.name for path in GOLDEN.glob("sparkis-*.tar.xz"))
NEWER = "9.8.7"


def extracted(release: str, folder: Path) -> Path:
    """Extract a release's files into a folder."""
    with tarfile.open(GOLDEN / release) as archive:
        archive.extractall(folder, filter="data")
    return folder


@contextmanager
def raise_format(path: Path, newest: int = NEWEST_FORMAT) -> Iterator[str]:
    """Make a file one of a newer version for the block; yield a pattern of the sentence that refuses it."""
    before = path.read_bytes()
    content = json.loads(before) | {"format": newest + 1, "sparkis": NEWER}
    has_checksum = content.pop("checksum", None) is not None
    path.write_bytes(with_checksum(content) if has_checksum else json.dumps(content).encode())
    yield (
        f"{re.escape(path.name)} has format {newest + 1}, which sparkis {NEWER} wrote; this one, sparkis .*, reads "
        f"up to format {newest}: upgrade it"
    )
    path.write_bytes(before)
