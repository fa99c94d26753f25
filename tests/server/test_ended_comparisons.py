"""A comparison with real servers that SIGTERM ends leaves none of its servers."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from compat.conformance.servers import REDIS_SERVER
from compat.processes import children_of, killed_at_end
from compat.waiting import WAIT_S_MAX, eventually

# There is no Java on the PATH, and nothing to install it with: client_programs only starts its servers.
COMPARISONS = {
    "client_programs": ("--client", "Jedis"),
    "conformance": ("--part", "commands"),
    "swap_programs": ("--program", "redis-cli"),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_sigterm_ends_comparison_with_its_servers(name: str, tmp_path: Path) -> None:
    for program in (REDIS_SERVER, "sh"):
        found = shutil.which(program)
        assert found is not None
        (tmp_path / program).symlink_to(found)
    command = [sys.executable, "-m", f"compat.{name}", *COMPARISONS[name]]
    with killed_at_end(command, env=os.environ | {"PATH": str(tmp_path)}) as comparison:
        server = eventually(lambda: redis_servers(comparison.pid), processes=[comparison])[0]
        eventually(lambda: len(children_of(comparison.pid)) > 1, processes=[comparison])
        comparison.terminate()
        assert comparison.wait(WAIT_S_MAX) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{server}").exists()


def redis_servers(pid: int) -> list[int]:
    return [child for child, line in children_of(pid).items() if REDIS_SERVER.encode() in line]
