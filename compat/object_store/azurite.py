"""A server of Azure's blobs: Azurite, which `make test-azure` installs, with one container. Its data is in memory."""

from __future__ import annotations

import base64
import hashlib
import hmac
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

from compat.conformance.servers import free_port
from compat.processes import killed_at_end
from compat.waiting import eventually

# What `scripts/azurite.sh` installs.
FOLDER = Path(__file__).parents[2] / "build" / "azurite" / "node_modules" / "azurite"
PROGRAM = FOLDER / "dist" / "src" / "blob" / "main.js"
ACCOUNT = "devstoreaccount1"
# The only key that Azurite's account has: https://learn.microsoft.com/azure/storage/common/storage-connect-azurite
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
VERSION = "2021-08-06"


def environment(port: int) -> dict[str, str]:
    """Return Azure's environment variables for a process that uses the server."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_USE_EMULATOR": "true",
        "AZURITE_BLOB_STORAGE_URL": f"http://127.0.0.1:{port}",
    }


@contextmanager
def running(container: str) -> Iterator[int]:
    """Run a server; return its port."""
    port = free_port()
    options = ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent"]
    command = ["node", str(PROGRAM), "--blobPort", str(port), *options]
    with killed_at_end(command, stdout=subprocess.DEVNULL) as process:
        eventually(lambda: _is_made(port, container), awaited="Azurite", processes=[process])
        yield port


def _is_made(port: int, container: str) -> bool:
    """Create a container, by a request with Azure's shared key; return whether the server has answered."""
    date = formatdate(usegmt=True)
    headers = f"x-ms-date:{date}\nx-ms-version:{VERSION}\n"
    signed = "PUT" + "\n" * 12 + headers + f"/{ACCOUNT}/{ACCOUNT}/{container}\nrestype:container"
    signature = base64.b64encode(hmac.digest(base64.b64decode(KEY), signed.encode(), hashlib.sha256)).decode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{ACCOUNT}/{container}?restype=container",
        method="PUT",
        headers={"x-ms-date": date, "x-ms-version": VERSION, "Authorization": f"SharedKey {ACCOUNT}:{signature}"},
    )
    try:
        urllib.request.urlopen(request).close()
    except ConnectionRefusedError:
        return False
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return False
        raise
    return True
