"""Daemons of a test cluster, which outlive the command that starts them."""

import argparse
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

_GIVEN_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Daemons:
    """Daemons of the cluster in a folder.

    `pids/NAME` holds the pid of a daemon and when its process started, since a pid is given to
    another process one day; `logs/NAME` holds what it prints.

    Parameters
    ----------
    folder : Path
        Of the cluster.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._pids, self.logs = folder / "pids", folder / "logs"

    def start(self, name: str, command: Sequence[str], **variables: str) -> None:
        """Start a daemon in a new session, with the cluster's folder as working directory."""
        self._pids.mkdir(parents=True, exist_ok=True)
        self.logs.mkdir(exist_ok=True)
        with open(self.logs / name, "ab") as log:
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **variables},
                cwd=self.folder,
                start_new_session=True,
            )
        (self._pids / name).write_text(f"{started.pid} {psutil.Process(started.pid).create_time()}")

    def names(self) -> list[str]:
        """Names of the running daemons."""
        return sorted(path.name for path in self._pids.glob("*"))

    def tail(self, name: str, lines: int = 15) -> str:
        """Return the last output lines of a daemon."""
        with contextlib.suppress(FileNotFoundError):
            return "\n".join((self.logs / name).read_text(errors="replace").splitlines()[-lines:])
        return ""

    def tails(self, names: Sequence[str]) -> str:
        """Return the last output lines of several daemons, for an error message."""
        return "".join(f"\n-- {name}\n{self.tail(name)}" for name in names)

    def process(self, name: str) -> psutil.Process | None:
        """Return the process of a running daemon."""
        try:
            pid, created = (self._pids / name).read_text().split()
            process = psutil.Process(int(pid))
            if process.create_time() == float(created) and process.status() != "zombie":
                return process
        except (FileNotFoundError, ValueError, psutil.Error):
            pass
        return None

    def await_all(self, ready: Callable[[], bool], seconds: float) -> None:
        """Wait until `ready` returns True; exit if a daemon ends or `seconds` have passed."""
        end = time.monotonic() + seconds
        while not ready():
            ended = [name for name in self.names() if self.process(name) is None]
            if ended:
                raise SystemExit(f"{', '.join(ended)} ended; see {self.logs}{self.tails(ended)}")
            if time.monotonic() > end:
                raise SystemExit(f"It was not ready after {seconds:g} s; see {self.logs}")
            time.sleep(0.2)

    def stop(self, names: Sequence[str] | None = None, patience: float = 15.0) -> None:
        """Terminate daemons in reverse order, and kill those that do not end."""
        names = self.names() if names is None else names
        running = [each for name in names if (each := self.process(name))]
        end_processes(running, patience)
        for name in names:
            (self._pids / name).unlink(missing_ok=True)

    def kill(self, name: str) -> None:
        """Kill a daemon to simulate a crash."""
        process = self.process(name)
        if process:
            process.kill()
            psutil.wait_procs([process], 10)


def end_processes(processes: Sequence[psutil.Process], patience: float) -> None:
    """Terminate processes, and kill those that do not end."""
    for process in processes:
        _signal(process, signal.SIGTERM)
    _, running = psutil.wait_procs(processes, patience)
    for process in running:
        _signal(process, signal.SIGKILL)
    psutil.wait_procs(running, patience)


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def run_command(description: str, commands: Mapping[str, Callable[..., None]]) -> None:
    """Run the function for ``COMMAND FOLDER ARGUMENT ...`` on the command line.

    Parameters
    ----------
    description : str
        For ``--help``.
    commands : mapping of str to callable
        Each takes the folder of a cluster and the arguments that follow. ``hold`` is added: start
        a cluster, say so, and stop it when the standard input ends, however its writer ended, or by
        SIGTERM.
    """

    def hold(folder: Path, *arguments: str) -> None:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        commands["start"](folder, *arguments)
        try:
            print("ready", flush=True)
            sys.stdin.read()
        finally:
            commands["stop"](folder)

    commands = {**commands, "hold": hold}
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=commands)
    parser.add_argument("folder", type=lambda path: Path(path).resolve())
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    commands[options.command](options.folder, *options.arguments)


def free_ports(count: int) -> list[int]:
    """Return free ports of the loopback interface.

    They lie below those that the system gives by itself, to servers on port 0 and to connections,
    so that no other program gets one before its daemon listens.
    """
    first = max(int(_GIVEN_PORTS.read_text().split()[0]), 20_000)
    sockets: list[socket.socket] = []
    for port in random.SystemRandom().sample(range(10_000, first), first - 10_000):
        if len(sockets) == count:
            break
        each = socket.socket()
        try:
            each.bind(("127.0.0.1", port))
        except OSError:
            each.close()
        else:
            sockets.append(each)
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def spark_home() -> Path:
    """Return the folder of Spark, by default that of the installed pyspark."""
    if os.environ.get("SPARK_HOME"):
        return Path(os.environ["SPARK_HOME"])
    import pyspark

    return Path(pyspark.__file__).parent


def java_home() -> Path:
    """Return the folder of Java."""
    home = os.environ.get("JAVA_HOME")
    return Path(home) if home else Path(os.path.realpath("/usr/bin/java")).parents[1]
