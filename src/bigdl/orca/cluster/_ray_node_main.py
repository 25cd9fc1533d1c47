"""The process that keeps a Ray node on a Spark executor's machine; the node does not outlive it.

It is run by :mod:`bigdl.orca.cluster.ray_on_spark` as a plain script and stays small.  Its standard
input brings an order, one line of JSON.  The node ends when the executor's JVM is gone, when Ray's
head does not answer any more, or when this process is told to.  If it ends by itself it is started
again.
"""

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TICK_S = 0.5  # seconds between two looks
MISSES = 4  # looks in a row at a head that does not answer
LONGEST_BASE = 20  # bytes
STARTS = 4  # times that the node is started: on a busy machine it may give up too early
GRACE_S = 3.0  # seconds from SIGTERM to SIGKILL

_libc = ctypes.CDLL(None)


def main():
    order = json.loads(sys.stdin.readline())
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # what the node leaves behind comes here
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    node = None
    base = tempfile.gettempdir()  # that of a container may be too long for the names of sockets
    base = base if len(base) <= LONGEST_BASE else "/tmp"
    directory = tempfile.mkdtemp(prefix="bigdl-ray-", dir=base)
    try:
        for attempt in range(STARTS):
            node = start(order, os.path.join(directory, str(attempt)))
            if not keep(node, order):
                break
            stop(node)  # what is left of it
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop(node)
        shutil.rmtree(directory, ignore_errors=True)


def start(order, directory):
    """Start the node; nodes that share a machine and a directory would take the same sockets."""
    with open(order["log"], "ab") as log:
        return subprocess.Popen(
            [*order["command"], f"--temp-dir={directory}"],
            env={**os.environ, **order["environment"]},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM),
        )


def keep(node, order):
    """Wait until it is time to stop; returns whether the node ended although it is not."""
    host, _, port = order["head"].rpartition(":")
    misses = 0
    while is_running(*order["executor"]):
        try:
            socket.create_connection((host, int(port)), 2.0).close()
            misses = 0
        except OSError:
            misses += 1
        if misses >= MISSES:
            return False
        if node.poll() is not None and not misses:
            return True
        time.sleep(TICK_S)
    return False


def is_running(pid, started):
    """Whether it is still the same process; `started` is field 22 of its stat."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except OSError:
        return False
    return fields[19] == started and fields[0] != "Z"


def stop(node):
    """End the node and all processes below this one."""
    if node is not None and node.poll() is None:
        node.terminate()
    end = time.monotonic() + GRACE_S
    while children() and time.monotonic() < end:
        reap()
        time.sleep(0.05)
    while left := children():
        for pid in left:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        reap()
        time.sleep(0.05)


def children():
    """Processes below this one, by their number; orphans come here, so none is missed for long."""
    found = []
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{task}/children") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


def reap():
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    main()
