"""`delay_relay.py TAP TAP SECONDS`: copy the frames of each device to the other, with a delay."""

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _IFF_TAP, _IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h


def open_tap(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI))
    return fd


def main() -> None:
    one, other = open_tap(sys.argv[1]), open_tap(sys.argv[2])
    delay_s = float(sys.argv[3])
    print("ready", flush=True)
    under_way: deque[tuple[float, int, bytes]] = deque()
    while True:
        left_s = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for fd in select.select([one, other], [], [], left_s)[0]:
            frame = os.read(fd, 1 << 16)
            under_way.append((time.monotonic() + delay_s, other if fd == one else one, frame))
        while under_way and under_way[0][0] <= time.monotonic():
            _, fd, frame = under_way.popleft()
            with contextlib.suppress(OSError):  # the device is down: lost
                os.write(fd, frame)


main()
