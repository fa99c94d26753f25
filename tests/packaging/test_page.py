"""The page of the installed wheel: its templates and files are there."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx

from compat.conformance.servers import free_port
from compat.processes import killed_at_end
from compat.waiting import WAIT_S_MAX


def test_page_of_wheel_has_its_templates_and_its_files(stranger: Path, tmp_path: Path) -> None:
    endpoint = f"redis://127.0.0.1:{free_port()}"  # nobody answers there
    command = [stranger, "-m", "sparkis", "ui", "--url", endpoint, "--port", "0", "--child"]
    with killed_at_end(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as page:
        assert page.stdin is not None and page.stdout is not None
        line = page.stdout.readline()
        url = line.partition(" ")[0]
        assert line == f"{url} shows {endpoint}; Ctrl-C ends it\n"
        shown = httpx.get(f"{url}/overview", timeout=WAIT_S_MAX).text
        assert "does not answer" in shown
        files = re.findall(r'(?:src|href)="(/static/[^"#]+)', shown)
        assert len(set(files)) == 4
        assert [httpx.get(url + each).status_code for each in files] == [200] * len(files)
        page.stdin.close()
        assert page.wait(WAIT_S_MAX) == 0
