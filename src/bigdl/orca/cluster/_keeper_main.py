"""The process that keeps a standalone Spark cluster; nothing of the cluster outlives it.

It is run by :mod:`bigdl.orca.cluster.standalone` as a plain script, without any package, and stays
small.  Its standard input brings an order, one line of JSON, and is a lifeline from then on: at its
end, or when the parent is gone, the cluster is stopped.  Its standard output brings one line of
JSON, the address of the master or what went wrong.

The keeper adopts orphans (executors of a worker that was killed), so it can end them too.
"""

import contextlib
import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
START_S = 120.0  # seconds in which a daemon must be up
GRACE_S = 5.0  # seconds from SIGTERM to SIGKILL
TICK_S = 0.5  # seconds between two looks at the daemons
RESTARTS = 10  # times that lost workers are replaced

_libc = ctypes.CDLL(None)


class Daemon:
    """One JVM of the cluster and its log."""

    def __init__(self, order, name, command):
        self.name, self.command, self.order = name, command, order
        self.log = os.path.join(order["directory"], f"{name}.log")
        self.start()

    def start(self):
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                self.command,
                env=self.order["environment"],
                cwd=self.order["directory"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )

    def wait_for(self, pattern):
        """Wait until the log has the pattern; returns its group."""
        give_up = time.monotonic() + START_S
        while time.monotonic() < give_up:
            ended = self.process.poll() is not None
            with open(self.log, errors="replace") as log:
                text = log.read()
            found = re.search(pattern, text)
            if found:
                return found.group(1)
            if ended:
                lines = [line for line in text.strip().splitlines() if not line.startswith("\tat ")]
                raise RuntimeError(f"the {self.name} ended at once: {' '.join(lines[-3:])}")
            if is_over(self.order, 0.05):
                raise SystemExit(0)
        raise RuntimeError(f"the {self.name} was not up within {START_S:g} s")


def main():
    order = json.loads(read_line())
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    daemons = []
    try:
        try:
            daemons.append(Daemon(order, "master", order["master"]))
            url = daemons[0].wait_for(r"Starting Spark master at (spark://\S+)")
            for number, command in enumerate(order["workers"]):
                daemons.append(Daemon(order, f"worker-{number}", [*command, url]))
            for worker in daemons[1:]:
                worker.wait_for(r"(Successfully registered with master)")
        except (RuntimeError, OSError) as error:
            reply({"error": str(error)})
            return
        reply({"master": url})
        keep(order, daemons)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop(daemons)
        shutil.rmtree(order["directory"], ignore_errors=True)


def keep(order, daemons):
    """Return when it is time to stop; replace workers that were lost."""
    master, *workers = daemons
    lost = 0
    while not is_over(order, TICK_S):
        if master.process.poll() is not None:
            return
        for worker in workers:
            if worker.process.poll() is not None and lost < RESTARTS:
                lost += 1
                worker.start()
        reap({daemon.process.pid for daemon in daemons})


def is_over(order, seconds):
    """Wait, and tell whether the parent closed the lifeline or is gone."""
    readable, _, _ = select.select([0], [], [], seconds)
    return bool(readable and not os.read(0, 1024)) or os.getppid() != order["parent"]


def stop(daemons):
    """End every process below this one."""
    for daemon in reversed(daemons):  # workers first: they end their executors
        daemon.process.terminate()
    give_up = time.monotonic() + GRACE_S
    for daemon in daemons:
        with contextlib.suppress(subprocess.TimeoutExpired):
            daemon.process.wait(max(0.0, give_up - time.monotonic()))
    while left := children(os.getpid()):
        for pid in left:
            kill_tree(pid)
        reap(set())
        time.sleep(0.01)


def kill_tree(pid):
    below = children(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    for child in below:
        kill_tree(child)


def reap(own):
    """Take note of the end of adopted processes."""
    for pid in children(os.getpid()):
        if pid not in own:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def children(parent):
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as stat:
                # The name of the program, in parentheses, may hold anything.
                if int(stat.read().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(name))
    return found


def read_line():
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)
        if not piece:
            raise SystemExit(1)
        line += piece
    return line


def reply(document):
    os.write(1, json.dumps(document).encode() + b"\n")


if __name__ == "__main__":
    main()
