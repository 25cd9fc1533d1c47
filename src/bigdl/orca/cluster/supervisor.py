"""The process that supervises what this program has started on a machine; nothing outlives it.

:func:`start` runs this module as a plain script, which needs psutil alone.  Its argument is its
role, and its standard input brings an order, one line of JSON.

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
CLOCK_S = 2.0  # seconds by which two processes may differ about when a third was started
LONGEST_RAY = 41  # bytes of a Ray's directory: the names of its sockets, of 64, may have 107 in all

MARK = "BIGDL_RAY"  # a variable of all processes of a Ray that was started here: its directory

_libc = ctypes.CDLL(None)


def start(role, order, *, replies=False, lock=None):
    """Start a supervisor in a session of its own, which Ctrl-C does not reach.

    Parameters
    ----------
    role : {"standalone", "ray-node", "ray-head"}
    order : dict
        What JSON can hold.
    replies : bool
        Read its standard output here.
    lock : int, optional
        Descriptor that it holds open: with the lock of the order's directory.

    Returns
    -------
    subprocess.Popen
    """
    script = [__file__]
    if not os.path.exists(__file__):  # in a zip file, which a driver has sent
        script = ["-c", __loader__.get_source(__name__)]
    process = subprocess.Popen(
        [sys.executable, "-P", *script, role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if replies else subprocess.DEVNULL,
        stderr=None if replies else subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=() if lock is None else (lock,),
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
        lost = supervise_daemons(order, daemons)
        if lost:
            print(json.dumps({"lost": lost}), flush=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # workers first: they end their executors
        stop([daemon.process for daemon in reversed(daemons)])
        remove(order["directory"])


def supervise_daemons(order, daemons):
    """Replace workers that were lost until it is time to stop; returns why, if it is a loss."""
    import psutil

    master, *workers = daemons
    lost = 0
    while not is_over(order, TICK_S):
        if master.process.poll() is not None:
            return told("master", master.process)
        for worker in workers:
            if worker.process.poll() is not None:
                if lost == DAEMON_RESTARTS:
                    return f"{told('worker', worker.process)}, after {lost} that were replaced"
                lost += 1
                worker.start()
        known = {daemon.process.pid for daemon in daemons}
        reap(child for child in psutil.Process().children() if child.pid not in known)
    return ""


def told(name, process):
    return f"its {name} (process {process.pid}) {exit_text(process.returncode)}"


def exit_text(code):
    """Return how a process ended, to follow its name."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def is_over(order, seconds):
    """Wait, and return True if the parent is gone."""
    time.sleep(seconds)
    return os.getppid() != order["parent"]


# A node of Ray ----------------------------------------------------------------------------------


def run_ray_node(order):
    node = None
    directory = order["directory"]
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
        remove(directory)


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
    end_marked(order["directory"])


def end_marked(directory):
    """Wait for the processes of a Ray to end, kill the rest, and remove its directory.

    Returns
    -------
    bool
        True if there was a rest.
    """
    give_up = time.monotonic() + GRACE_S
    while (left := marked(directory)) and time.monotonic() < give_up:
        time.sleep(0.1)
    killed = bool(left)
    while left:
        kill(left)
        time.sleep(0.05)
        left = marked(directory)
    remove(directory)
    return killed


def remove(directory):
    """Remove a directory, and the private root above it if that is empty."""
    shutil.rmtree(directory, ignore_errors=True)
    root = os.path.dirname(directory)
    if re.fullmatch(rf"bigdl-{os.geteuid()}(-\w{{8}})?", os.path.basename(root)):
        with contextlib.suppress(OSError):
            os.rmdir(root)


def marked(directory):
    """Return the other processes that were started with the mark of a directory."""
    import psutil

    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and has_mark(process, directory):
                processes.append(process)
    return processes


def has_mark(process, directory):
    """Return True if a process was started with the mark of a directory.

    Some of Ray's agents write their title over their environment: these log to the directory.
    """
    environment = process.environ()
    if environment:
        return environment.get(MARK) == directory
    return any(file.path.startswith(f"{directory}/") for file in process.open_files())


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
    import psutil

    for process in started:
        process.terminate()
    psutil.wait_procs(started, GRACE_S)
    while left := psutil.Process().children(recursive=True):
        kill(left)  # those below them come here
        reap(left)
        time.sleep(0.01)


def kill(processes):
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def reap(processes):
    """Take note of the end of children, adopted ones too."""
    for process in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, os.WNOHANG)


def is_running(pid, started):
    """Return True if it is still the process that was started then."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - started) < CLOCK_S
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    return False


if __name__ == "__main__":
    main()
