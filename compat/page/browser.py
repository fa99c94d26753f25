"""A Chromium without a window, and the page of `sparkis ui` as a process of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions, ChromeService

CHROMIUM, DRIVER = "chromium", "chromedriver"
LAPTOP, PHONE = (1280, 860), (390, 844)
STOP_S_MAX = 30.0


def has_chromium() -> bool:
    """Return whether Chromium and its driver are installed."""
    return shutil.which(CHROMIUM) is not None and shutil.which(DRIVER) is not None


@contextmanager
def chromium(folder: Path, size: tuple[int, int] = LAPTOP, *, records_requests: bool = False) -> Iterator[Chrome]:
    """Run a Chromium whose profile is in a folder. records_requests: `get_log("performance")` has its requests."""
    options = ChromeOptions()
    options.binary_location = str(shutil.which(CHROMIUM))
    for each in (
        "headless=new",
        "no-sandbox",  # root has none
        "disable-gpu",
        "disable-dev-shm-usage",
        "disable-background-networking",
        "disable-component-update",
        "disable-extensions",
        "hide-scrollbars",
        "no-first-run",
        f"user-data-dir={folder}",
        f"window-size={size[0]},{size[1]}",
    ):
        options.add_argument(f"--{each}")
    if records_requests:
        options.set_capability("goog:loggingPrefs", {"performance": "ALL", "browser": "ALL"})
    browser = Chrome(options, ChromeService(str(shutil.which(DRIVER))))
    try:
        yield browser
    finally:
        browser.quit()


@contextmanager
def page_of(url: str, *options: str) -> Iterator[str]:
    """Run `sparkis ui` for an endpoint, on a free port; return the page's address."""
    command = [sys.executable, "-m", "sparkis", "ui", "--url", url, "--port", "0", "--child", *options]
    # Its standard input stays open: it ends with this process.
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.match(r"https?://\S+", process.stdout.readline())
            if found is None:
                raise RuntimeError(f"sparkis ui does not start: exit code {process.wait(STOP_S_MAX)}")
            yield found[0]
        finally:
            process.terminate()
            process.wait(STOP_S_MAX)
