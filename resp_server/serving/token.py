"""The token with which the project's own processes authenticate: from a file or the environment, not a command line."""

from __future__ import annotations

import argparse
import os

from resp_server.net.children import TOKEN_VARIABLE
from resp_server.net.text_files import read_text


def token_of(options: argparse.Namespace) -> str:
    """Return the token, and remove it from the environment; ValueError if there is none."""
    token = os.environ.pop(TOKEN_VARIABLE, "")
    if options.token_file is not None:
        try:
            token = read_text(options.token_file).strip()
        except OSError as error:
            raise ValueError(f"--token-file {options.token_file}: {error.strerror}") from None
    if not token:
        raise ValueError(
            f"there is no token: give registry and servers the same secret in {TOKEN_VARIABLE}, or in a file with "
            "--token-file"
        )
    return token
