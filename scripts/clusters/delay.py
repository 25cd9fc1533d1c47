"""Delay the packets of a kernel queue by a constant time.

python delay.py MILLISECONDS    # of the queue 0 of this network namespace; prints "ready"

The packets stay in the kernel, which only tells their numbers (nfnetlink_queue, without a
library). A packet is held whole, also one that the network card would cut.
"""

import contextlib
import os
import select
import socket
import struct
import sys
import time
from collections import deque

_NETFILTER = 12  # family of netlink
_QUEUE = 3 << 8  # subsystem
_PACKET, _CONFIG, _VERDICTS = _QUEUE, _QUEUE | 2, _QUEUE | 3
_REQUEST, _ACKNOWLEDGE, _ERROR = 1, 4, 2
_BIND, _NUMBERS_ONLY, _WHOLE, _ACCEPT = 1, 1, 4, 1
_NO_BUFFER_ERRORS = 5  # option of a netlink socket
_HEAD = struct.Struct("=IHHII")  # of a message
_LONGEST = 1 << 16  # packets of the queue


def message(kind: int, *attributes: tuple[int, bytes], flags: int = 0) -> bytes:
    """Return a netlink message for queue 0."""
    body = struct.pack("=BBH", 0, 0, 0)
    for number, value in attributes:
        body += struct.pack("=HH", 4 + len(value), number) + value + b"\0" * (-len(value) % 4)
    return _HEAD.pack(_HEAD.size + len(body), kind, _REQUEST | flags, 0, 0) + body


def bound() -> socket.socket:
    """Return a socket that receives the queue's packets."""
    link = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    link.setsockopt(270, _NO_BUFFER_ERRORS, 1)
    link.bind((0, 0))
    for attributes in (
        [(1, struct.pack("!BBH", _BIND, 0, socket.AF_INET))],
        [(2, struct.pack("!IB", 0, _NUMBERS_ONLY)), (3, struct.pack("!I", _LONGEST))],
        [(4, struct.pack("!I", _WHOLE)), (5, struct.pack("!I", _WHOLE))],
    ):
        link.send(message(_CONFIG, *attributes, flags=_ACKNOWLEDGE))
        answer = link.recv(4096)
        (error,) = struct.unpack_from("=i", answer, _HEAD.size)
        if error:
            raise OSError(-error, f"the queue cannot be had: {os.strerror(-error)}")
    return link


def numbers(data: bytes) -> list[int]:
    """Return the packet ids in netlink messages."""
    ids, offset = [], 0
    while offset < len(data):
        length, kind, *_ = _HEAD.unpack_from(data, offset)
        if kind == _PACKET:  # its first attribute begins with the number
            ids.append(struct.unpack_from("!I", data, offset + _HEAD.size + 8)[0])
        offset += length + -length % 4
    return ids


def main() -> None:
    seconds = float(sys.argv[1]) / 1e3
    with contextlib.suppress(OSError):  # the processes that are measured must not hold it up
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    link = bound()
    print("ready", flush=True)
    held: deque[tuple[float, int]] = deque()  # when a packet may go, and its number
    while True:
        patience = max(0.0, held[0][0] - time.monotonic()) if held else None
        if select.select([link], [], [], patience)[0]:
            due = time.monotonic() + seconds
            held.extend((due, number) for number in numbers(link.recv(1 << 20)))
        now, last = time.monotonic(), None
        while held and held[0][0] <= now:
            last = held.popleft()[1]
        if last is not None:  # a verdict for all up to this one
            link.send(message(_VERDICTS, (2, struct.pack("!II", _ACCEPT, last))))


if __name__ == "__main__":
    main()
