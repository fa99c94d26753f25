"""What `netem` does where the kernel lacks it: packets that a router sends to a device come back later, or not at all.

    python -m tests.hosts.delayed_packets DELAY_MS LOSS

Each packet waits for a random part of the time, so some overtake others. It prints the device's name, and ends with
its standard input.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import struct
import sys
import time
from heapq import heappop, heappush
from random import Random

DEVICE = "delayed"
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
PACKET_BYTES_MAX = 1 << 16
# Beyond these the newest are lost, as in a router.
PACKETS_MAX = 10_000


def main(delay_ms: int, loss: float) -> None:
    """Pass packets on until the standard input ends."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", DEVICE.encode(), IFF_TUN | IFF_NO_PI))
    print(json.dumps({"device": DEVICE}), flush=True)
    random, waiting = Random(1), list[tuple[float, bytes]]()
    while True:
        wait_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([0, device], [], [], wait_s)
        if 0 in readable:
            return
        if device in readable:
            packet = os.read(device, PACKET_BYTES_MAX)
            if random.random() >= loss and len(waiting) < PACKETS_MAX:
                heappush(waiting, (time.monotonic() + random.uniform(0.5, 1.0) * delay_ms / 1000, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            os.write(device, heappop(waiting)[1])


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
