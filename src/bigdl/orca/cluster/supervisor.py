"""The process that supervises what this program has started on a machine; nothing outlives it.

:func:`start` runs this module as a plain script, without any package.  Its argument is its role,
and its standard input brings an order, one line of JSON.

``standalone``
    Runs the daemons of a standalone Spark cluster (:mod:`bigdl.orca.cluster.standalone`), which is
    stopped when this process is told to end (:func:`end`) or its parent is gone.  Standard output
    brings one line of JSON, the master's address or what went wrong.
``ray-node``
    Runs a Ray node on a Spark executor's machine (:mod:`bigdl.orca.cluster.ray_launch`).  It is
    ended when the executor's JVM is gone, Ray's head does not answer any more, or this process is
    told to; if it ends by itself it is started again.
``ray-head``
    Waits for the end of the driver of a Ray and ends what is left of it.  Ray's main processes die
    with the driver; its agents look for the head for a minute or more, and its files would stay.

The first two adopt orphans (executors of a Spark worker that was killed), so they can end them too.
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
TICK_S = 0.5  # seconds between two looks at the processes
GRACE_S = 5.0  # seconds from SIGTERM to SIGKILL
STOP_S = 20.0  # seconds that a supervisor has to end what it runs
DAEMON_START_S = 120.0  # seconds in which a daemon must be up
DAEMON_RESTARTS = 10  # times that lost workers are replaced
NODE_STARTS = 4  # times that a node is started: on a busy machine it may give up too early
HEAD_MISSES = 4  # looks in a row at a head that does not answer
LONGEST_BASE = 20  # bytes of the folder of Ray's session, which holds sockets with long names

_libc = ctypes.CDLL(None)


def start(role, order, *, replies=False):
    """Start a supervisor in a session of its own, which Ctrl-C does not reach.

    Parameters
    ----------
    role : {"standalone", "ray-node", "ray-head"}
    order : dict
        What JSON can hold.
    replies : bool
        Read its standard output here.

    Returns
    -------
    subprocess.Popen
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", __file__, role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if replies else subprocess.DEVNULL,
        stderr=None if replies else subprocess.DEVNULL,
        start_new_session=True,
    )
    process.stdin.write(json.dumps(order).encode() + b"\n")
    process.stdin.close()
    return process


def end(process):
    """Let a supervisor end what it runs, and wait for it."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel ends the daemons with it
        process.wait()


def main():
    order = json.loads(sys.stdin.readline() or sys.exit(1))
    roles = {"standalone": run_standalone, "ray-node": run_ray_node, "ray-head": watch_ray_head}
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # what a child leaves behind comes here
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    roles[sys.argv[1]](order)


# A standalone Spark cluster ---------------------------------------------------------------------


class Daemon:
    """One JVM of the cluster and its log."""

    def __init__(self, order, name, command):
        self.name, self.command, self.order = name, command, order
        self.log = os.path.join(order["directory"], f"{name}.log")
        self.start()

    def start(self):
        directory = self.order["directory"]
        self.process = start_child(
            self.command, self.order["environment"], self.log, "wb", signal.SIGKILL, directory
        )

    def wait_for(self, pattern):
        """Wait until the log has the pattern; returns its group."""
        give_up = time.monotonic() + DAEMON_START_S
        while time.monotonic() < give_up:
            ended = self.process.poll() is not None
            with open(self.log, errors="replace") as log:
                text = log.read()
            match = re.search(pattern, text)
            if match:
                return match.group(1)
            if ended:
                lines = [line for line in text.strip().splitlines() if not line.startswith("\tat ")]
                raise RuntimeError(f"the {self.name} ended at once: {' '.join(lines[-3:])}")
            if is_over(self.order, 0.05):
                raise SystemExit(0)
        raise RuntimeError(f"the {self.name} was not up within {DAEMON_START_S:g} s")


def run_standalone(order):
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
            print(json.dumps({"error": str(error)}), flush=True)
            return
        print(json.dumps({"master": url}), flush=True)
        supervise_daemons(order, daemons)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # workers first: they end their executors
        stop([daemon.process for daemon in reversed(daemons)])
        shutil.rmtree(order["directory"], ignore_errors=True)


def supervise_daemons(order, daemons):
    """Return when it is time to stop; replace workers that were lost."""
    master, *workers = daemons
    lost = 0
    while not is_over(order, TICK_S):
        if master.process.poll() is not None:
            return
        for worker in workers:
            if worker.process.poll() is not None and lost < DAEMON_RESTARTS:
                lost += 1
                worker.start()
        reap({daemon.process.pid for daemon in daemons})


def is_over(order, seconds):
    """Wait, and return True if the parent is gone."""
    time.sleep(seconds)
    return os.getppid() != order["parent"]


# A node of Ray ----------------------------------------------------------------------------------


def run_ray_node(order):
    node = None
    directory = ray_directory()
    try:
        for attempt in range(NODE_STARTS):
            # nodes that share a machine and a directory would take the same sockets
            command = [*order["command"], f"--temp-dir={directory}/{attempt}"]
            environment = {**os.environ, **order["environment"]}
            node = start_child(command, environment, order["log"], "ab", signal.SIGTERM)
            if not is_to_restart(node, order):
                break
            stop([node])  # what is left of it
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop([node] if node else [])
        shutil.rmtree(directory, ignore_errors=True)


def ray_directory():
    """Make a directory for a node; the names of its sockets, of 64 bytes, may have 107 in all."""
    base = tempfile.gettempdir()
    base = base if len(base) <= LONGEST_BASE else "/tmp"
    return tempfile.mkdtemp(prefix="bigdl-ray-", dir=base)


def is_to_restart(node, order):
    """Wait until the node has ended (True) or it is time to stop it (False)."""
    host, _, port = order["head"].rpartition(":")
    misses = 0
    while is_running(*order["executor"]):
        try:
            socket.create_connection((host, int(port)), 2.0).close()
            misses = 0
        except OSError:
            misses += 1
        if misses >= HEAD_MISSES:
            return False
        if node.poll() is not None and not misses:
            return True
        time.sleep(TICK_S)
    return False


def watch_ray_head(order):
    while not is_over(order, TICK_S):
        pass
    end_marked(order["mark"], order["directory"])


def end_marked(mark, directory):
    """Wait for the processes with a mark to end, kill the rest, and remove their directory.

    Returns
    -------
    bool
        True if there was a rest.
    """
    give_up = time.monotonic() + GRACE_S
    while (left := marked(mark.encode())) and time.monotonic() < give_up:
        time.sleep(0.1)
    killed = bool(left)
    while left:
        for pid in left:
            kill(pid)
        time.sleep(0.05)
        left = marked(mark.encode())
    shutil.rmtree(directory, ignore_errors=True)
    return killed


def marked(mark):
    """Return the processes that were started with the mark among their environment variables."""
    pids = []
    for pid in processes():
        with contextlib.suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            if pid != os.getpid() and mark in file.read().split(b"\0"):
                pids.append(pid)
    return pids


# Processes --------------------------------------------------------------------------------------


def start_child(command, environment, log, mode, signal_of_death, directory=None):
    """Start a process that gets the signal when this one is gone."""
    with open(log, mode) as output:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: _libc.prctl(PR_SET_PDEATHSIG, signal_of_death),
        )


def stop(started):
    """End these processes, then every one below this one."""
    for process in started:
        process.terminate()
    give_up = time.monotonic() + GRACE_S
    for process in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, give_up - time.monotonic()))
    while left := children(os.getpid()):
        for pid in left:
            kill(pid)  # those below it come here
        reap(set())
        time.sleep(0.01)


def kill(pid):
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def reap(known):
    """Take note of the end of adopted processes."""
    for pid in children(os.getpid()):
        if pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def processes():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def status(pid):
    """Return the fields of a process's status from its state on (field 3), None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            # the name of the program, in parentheses, may hold anything
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None


def children(parent):
    fields = {pid: status(pid) for pid in processes()}
    return [pid for pid, each in fields.items() if each and int(each[1]) == parent]


def start_time(pid):
    """Return when a process was started, None if it is gone."""
    fields = status(pid)
    return None if fields is None or fields[0] == "Z" else fields[19]


def is_running(pid, started):
    """Return True if it is still the process that was started then."""
    return start_time(pid) == started


if __name__ == "__main__":
    main()
