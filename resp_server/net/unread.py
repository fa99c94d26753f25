"""Input that a process has not read yet: the kernel has it."""

from __future__ import annotations

import array
import asyncio
import fcntl
import termios


def unread_bytes(transport: asyncio.BaseTransport) -> int:
    """Return how many bytes have arrived at a transport's socket that nobody has read; 0 if it is closed."""
    size = array.array("i", [0])
    try:
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.FIONREAD, size)
    except (OSError, ValueError):
        return 0
    return size[0]
