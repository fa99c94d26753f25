"""The image that `make test-image` has built, and a container of it.

Engines need cgroups to run a container, which a machine of tests may not let them make. `systemd-nspawn` needs none,
and gets from the image's configuration what an engine would: the command, the user, the environment.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.nspawn import Container, started

IMAGE = Path(__file__).parents[2] / "build" / "image"
ROOT = IMAGE / "root"


def inspected() -> Mapping[str, Any]:
    """Return what `podman image inspect` says of the image."""
    (found,) = json.loads((IMAGE / "image.json").read_text())
    return dict(found)


@contextmanager
def running(log: Path, store: Path, output: Path, **variables: str) -> Iterator[Container]:
    """Run the image as docs/deploy.md does: read-only, with a /tmp in memory, a log and a volume for stores."""
    config = inspected()["Config"]
    user, group = map(int, config["User"].split(":"))
    words = [
        *(f"--directory={ROOT}", "--read-only", "--tmpfs=/tmp", "--link-journal=no", f"--chdir={config['WorkingDir']}"),
        *(f"--bind={log}:/srv/sparkis/log", f"--bind={store}:{next(iter(config['Volumes']))}"),
        *(f"--setenv={each}" for each in config["Env"] if not each.startswith("PIP_")),
        *(f"--setenv={name}={value}" for name, value in variables.items()),
        # nspawn takes a name; the image's user has the numbers of the configuration.
        f"--user={_name_of(user, group)}",
        *config["Entrypoint"],
        *config["Cmd"],
    ]
    with started(words, output) as process:
        yield Container(process)


def _name_of(user: int, group: int) -> str:
    lines = [line.split(":") for line in (ROOT / "etc" / "passwd").read_text().splitlines()]
    return next(each[0] for each in lines if each[2:4] == [str(user), str(group)])
