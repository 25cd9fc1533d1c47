"""The process that ends what is left of a Ray whose driver was killed.

It is run by :mod:`bigdl.orca.cluster.ray_launch` as a plain script and stays small.  Its standard
input brings an order, one line of JSON: the driver, the directory of Ray's session, and a mark that
every process of this Ray has in its environment.  Ray's main processes die with the driver; its
agents look for the head for a minute or more, and the directory would stay.
"""

import contextlib
import json
import os
import shutil
import signal
import sys
import time

from _ray_node_main import TICK_S, is_running

GRACE_S = 5.0  # seconds that Ray gets to end by itself


def main():
    order = json.loads(sys.stdin.readline())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # the driver stops Ray by itself
    while is_running(*order["driver"]):
        time.sleep(TICK_S)
    mark = order["mark"].encode()
    end = time.monotonic() + GRACE_S
    while marked(mark) and time.monotonic() < end:
        time.sleep(TICK_S)
    while left := marked(mark):
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    shutil.rmtree(order["directory"], ignore_errors=True)


def marked(mark):
    """Processes that were started with the mark among their environment variables."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if mark in file.read().split(b"\0"):
                    found.append(int(name))
    return found


if __name__ == "__main__":
    main()
