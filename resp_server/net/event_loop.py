"""The event loop of this package's programs: uvloop's, or asyncio's own where uvloop is not installed.

uvloop is compiled. A Spark job that ships sparkis with `--py-files` brings no compiled packages to the executors.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from importlib.util import find_spec
from typing import Any, TypeVar

logger = logging.getLogger("sparkis.server")

Result = TypeVar("Result")
IS_UVLOOP = find_spec("uvloop") is not None
NAME = "uvloop" if IS_UVLOOP else "asyncio"


def run(main: Coroutine[Any, Any, Result], *, is_worker: bool = False) -> Result:
    """Run a coroutine to its end, and return its result.

    Args:
        is_worker: Another process has said which loop it is.
    """
    if IS_UVLOOP:
        import uvloop

        return uvloop.run(main)
    if not is_worker:
        logger.warning("uvloop is not installed: this server uses Python's own event loop, which is slower")
    return asyncio.run(main)
