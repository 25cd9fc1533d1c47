"""Supervisor process that stops a program's processes on a machine when the program ends.

:func:`start` runs this module as a plain script, which needs only psutil.  Its argument is its
role, and it reads its request, one line of JSON, from standard input.

``standalone``
    Runs the daemons of a standalone Spark cluster (:mod:`bigdl.orca.cluster.standalone`) until
    this process is terminated (:func:`end`) or its parent ends.  It prints one line of JSON, the
    master's address or an error.
``ray-node``
    Runs a Ray node on a Spark executor's machine (:mod:`bigdl.orca.cluster.ray_launch`).  It stops
    the node when the executor's JVM ends, Ray's head does not respond, or this process is
    terminated; it restarts a node that ends by itself.
``ray-head``
    Waits for the end of a Ray's driver and stops remaining processes.  Ray's main processes end
    with the driver, but its agents search the head for a minute or more, and its files remain.

The first two adopt orphans (such as executors of a killed Spark worker), so they can stop them.
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
TICK_S = 0.5  # seconds between checks of the processes
GRACE_S = 5.0  # seconds from SIGTERM to SIGKILL
STOP_S = 20.0  # seconds for a supervisor to stop its processes
DAEMON_START_S = 120.0  # seconds for a daemon to start
DAEMON_RESTARTS = 10  # maximum number of replaced workers
NODE_STARTS = 4  # start attempts of a node, which may time out on a busy machine
HEAD_MISSES = 4  # consecutive failed connections to the head
CLOCK_S = 2.0  # tolerance in seconds for start times of processes
LONGEST_RAY = 41  # maximum bytes of a Ray directory's path; socket paths are limited to 107

MARK = "BIGDL_RAY"  # environment variable of all processes of a Ray: its directory

SIGKILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # not on Windows


def start(role, request, *, replies=False, lock=None):
    """Start a supervisor in a new session, which Ctrl-C does not reach.

    Parameters
    ----------
    role : {"standalone", "ray-node", "ray-head"}
    request : dict
        Request of the role, JSON-serializable.
    replies : bool
        Pipe its standard output to this process.
    lock : int, optional
        Descriptor of the directory's lock, which it keeps open.

    Returns
    -------
    subprocess.Popen
    """
    script = [__file__]
    if not os.path.exists(__file__):  # this module is in a zip file sent by the driver
        script = ["-c", __loader__.get_source(__name__)]
    process = subprocess.Popen(
        [sys.executable, "-P", *script, role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE if replies else subprocess.DEVNULL,
        stderr=None if replies else subprocess.DEVNULL,
        start_new_session=True,
        pass_fds=() if lock is None or os.name == "nt" else (lock,),
    )
    process.stdin.write(json.dumps(request).encode() + b"\n")
    process.stdin.close()
    return process


def end(process):
    """Make a supervisor stop its processes, and wait until it has ended."""
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel then stops the daemons, too
        process.wait()


def main():
    request = json.loads(sys.stdin.readline() or sys.exit(1))
    roles = {"standalone": run_standalone, "ray-node": run_ray_node, "ray-head": watch_ray_head}
    control_process(PR_SET_CHILD_SUBREAPER, 1)  # adopt orphaned descendants
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    roles[sys.argv[1]](request)


# A standalone Spark cluster ---------------------------------------------------------------------


class Daemon:
    """JVM process of the standalone cluster (master or worker), with its log file."""

    def __init__(self, request, name, command):
        self.name, self.command, self.request = name, command, request
        self.log = os.path.join(request["directory"], f"{name}.log")
        self.start()

    def start(self):
        directory = self.request["directory"]
        self.process = start_child(
            self.command, self.request["environment"], self.log, "wb", SIGKILL, directory
        )

    def wait_for(self, pattern):
        """Wait until the log matches a regular expression, and return the match's first group."""
        deadline = time.monotonic() + DAEMON_START_S
        while time.monotonic() < deadline:
            ended = self.process.poll() is not None
            with open(self.log, errors="replace") as log:
                text = log.read()
            match = re.search(pattern, text)
            if match:
                return match.group(1)
            if ended:
                lines = [line for line in text.strip().splitlines() if not line.startswith("\tat ")]
                raise RuntimeError(f"the {self.name} ended immediately: {' '.join(lines[-3:])}")
            if is_over(self.request, 0.05):
                raise SystemExit(0)
        raise RuntimeError(f"the {self.name} did not start within {DAEMON_START_S:g} s")


def run_standalone(request):
    daemons = []
    try:
        try:
            daemons.append(Daemon(request, "master", request["master"]))
            url = daemons[0].wait_for(r"Starting Spark master at (spark://\S+)")
            for number, command in enumerate(request["workers"]):
                daemons.append(Daemon(request, f"worker-{number}", [*command, url]))
            for worker in daemons[1:]:
                worker.wait_for(r"(Successfully registered with master)")
        except (RuntimeError, OSError) as error:
            print(json.dumps({"error": str(error)}), flush=True)
            return
        print(json.dumps({"master": url}), flush=True)
        lost = supervise_daemons(request, daemons)
        if lost:
            print(json.dumps({"lost": lost}), flush=True)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        # workers first, because they stop their executors
        stop([daemon.process for daemon in reversed(daemons)])
        remove(request["directory"])


def supervise_daemons(request, daemons):
    """Replace lost workers until the cluster stops; return the reason if it was lost, or ""."""
    import psutil

    master, *workers = daemons
    lost = 0
    while not is_over(request, TICK_S):
        if master.process.poll() is not None:
            return loss_text("master", master.process)
        for worker in workers:
            if worker.process.poll() is not None:
                if lost == DAEMON_RESTARTS:
                    return f"{loss_text('worker', worker.process)}, after {lost} replacements"
                lost += 1
                worker.start()
        known = {daemon.process.pid for daemon in daemons}
        reap(child for child in psutil.Process().children() if child.pid not in known)
    return ""


def loss_text(name, process):
    return f"its {name} (process {process.pid}) {exit_text(process.returncode)}"


def exit_text(code):
    """Describe how a process ended, in words that follow the process name."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def is_over(request, seconds):
    """Wait for `seconds`, and return True if the parent process has ended."""
    time.sleep(seconds)
    if os.name == "nt":  # a process keeps the number of its parent there
        import psutil

        return not psutil.pid_exists(request["parent"])
    return os.getppid() != request["parent"]


# A node of Ray ----------------------------------------------------------------------------------


def run_ray_node(request):
    node = None
    directory = request["directory"]
    try:
        for attempt in range(NODE_STARTS):
            # nodes on one machine need separate directories for their sockets
            command = [*request["command"], f"--temp-dir={directory}/{attempt}"]
            environment = {**os.environ, **request["environment"]}
            node = start_child(command, environment, request["log"], "ab", signal.SIGTERM)
            if not is_to_restart(node, request):
                break
            stop([node])  # remaining processes of the node
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        stop([node] if node else [])
        remove(directory)


def is_to_restart(node, request):
    """Wait until the node has ended (return True) or must be stopped (return False)."""
    host, _, port = request["head"].rpartition(":")
    misses = 0
    while is_running(*request["executor"]):
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


def watch_ray_head(request):
    while not is_over(request, TICK_S):
        pass
    end_marked(request["directory"])


def end_marked(directory):
    """Wait for a Ray instance to end, kill its remaining processes and remove its directory.

    Returns
    -------
    bool
        True if processes were killed.
    """
    deadline = time.monotonic() + GRACE_S
    while (remaining := marked(directory)) and time.monotonic() < deadline:
        time.sleep(0.1)
    killed = bool(remaining)
    while remaining:
        kill(remaining)
        time.sleep(0.05)
        remaining = marked(directory)
    remove(directory)
    return killed


def remove(directory):
    """Remove a directory, and its parent if that is BigDL's private directory and empty."""
    shutil.rmtree(directory, ignore_errors=True)
    root = os.path.dirname(directory)
    user = getattr(os, "geteuid", lambda: r"\w+")()
    if re.fullmatch(rf"bigdl-{user}(-\w{{8}})?", os.path.basename(root)):
        with contextlib.suppress(OSError):
            os.rmdir(root)


def marked(directory):
    """Return all processes, except this one, of the Ray instance that uses a directory."""
    import psutil

    processes = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and has_mark(process, directory):
                processes.append(process)
    return processes


def has_mark(process, directory):
    """Return True if a process belongs to the Ray instance that uses a directory.

    Some Ray agents overwrite their environment with their title; they are recognized by their log
    files in the directory.
    """
    environment = process.environ()
    if environment:
        return environment.get(MARK) == directory
    return any(file.path.startswith(f"{directory}/") for file in process.open_files())


# Processes --------------------------------------------------------------------------------------


def control_process(option, value):
    """Call Linux's ``prctl`` for this process; other systems do nothing."""
    library = None if os.name == "nt" else ctypes.CDLL(None)
    if hasattr(library, "prctl"):
        library.prctl(option, value)


def start_child(command, environment, log, mode, signal_of_death, directory=None):
    """Start a process that receives a given signal when this process ends."""
    with open(log, mode) as output:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=directory,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: control_process(PR_SET_PDEATHSIG, signal_of_death),
        )


def stop(started):
    """Terminate the `started` processes, then kill all remaining descendants of this process."""
    import psutil

    for process in started:
        process.terminate()
    psutil.wait_procs(started, GRACE_S)
    while remaining := psutil.Process().children(recursive=True):
        kill(remaining)  # their children are adopted
        reap(remaining)
        time.sleep(0.01)


def kill(processes):
    import psutil

    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()


def reap(processes):
    """Collect the exit status of children, including adopted ones."""
    for process in processes:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, getattr(os, "WNOHANG", 0))


def is_running(pid, started):
    """Return True if the process with this id and start time is running."""
    import psutil

    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - started) < CLOCK_S
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    return False


if __name__ == "__main__":
    main()
