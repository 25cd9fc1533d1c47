"""The JVM of the driver's Spark: whether it runs, and what its end means for a program.

A :class:`JvmWatch` belongs to a py4j gateway.  From then on a call into a JVM that is gone raises a
:class:`SparkLost`, one sentence, in place of py4j's errors about sockets.  Whoever reads from
another connection of that JVM asks :func:`loss_of`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.common.timeouts import JVM_BROKEN_S, JVM_LOOK_S, JVM_STOPPED_S
from bigdl.runtime.process import exit_message

if TYPE_CHECKING:
    from py4j.java_gateway import JavaGateway
    from pyspark import SparkContext

logger = logging.getLogger("bigdl.orca")

_WATCH = "_bigdl_watch"  # attribute of a gateway
_NO_ANSWER = "x"
_ADVICE = "call stop_orca_context and init_orca_context, and make again what lived in it"


class SparkLost(UsageError):
    """Spark's JVM, or the cluster that was started with it, is gone."""

    code = "context-stopped"


class JvmWatch:
    """A thread that waits for the end of a JVM, and what its end means.

    Parameters
    ----------
    gateway : py4j.java_gateway.JavaGateway
        Of PySpark, which keeps the process that it started as ``proc``; a program that
        ``spark-submit`` runs has none.
    """

    def __init__(self, gateway: JavaGateway):
        self.process: subprocess.Popen | None = vars(gateway).get("proc")
        self._reason = ""
        self._is_stopped = threading.Event()  # by this program
        self._warned_at = 0.0
        self._client = gateway._gateway_client
        self._send = self._client.send_command
        self._client.send_command = self._send_command
        self._connect = self._client._get_connection
        self._client._get_connection = self._watched_connection
        if self.process is not None:
            threading.Thread(target=self._run, name="bigdl-jvm", daemon=True).start()

    @classmethod
    def of(cls, gateway: JavaGateway) -> JvmWatch:
        """Return the watch of a gateway, which is made by the first call."""
        return vars(gateway).get(_WATCH) or vars(gateway).setdefault(_WATCH, cls(gateway))

    def expect_end(self) -> None:
        """Note that this program ends the JVM itself."""
        self._is_stopped.set()

    def end(self, reason: str) -> None:
        """Kill a JVM that can do nothing more.

        Parameters
        ----------
        reason : str
            What is gone; it takes the place of the sentence about the JVM.
        """
        if self.process is not None and not self._is_stopped.is_set() and not self._reason:
            self._reason = reason
            self.process.kill()

    def loss(self, patience: float = 0.0) -> SparkLost | None:
        """Return the error that the end of the JVM is; None if it runs or was stopped by us.

        Parameters
        ----------
        patience : float
            Seconds that it has to end, where its connections are broken.
        """
        if self._is_stopped.is_set():
            return None
        if self.process is None:
            return SparkLost(f"Spark's JVM is gone; {_ADVICE}") if self._refuses() else None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(patience) if patience else self.process.poll()
        code = self.process.returncode
        if code is None or self._is_stopped.is_set():
            return None
        how = exit_message(code) if code < 0 else f"ended with exit code {code}"
        reason = self._reason or f"Spark's JVM (process {self.process.pid}) is gone: it {how}"
        return SparkLost(f"{reason}; {_ADVICE}")

    def is_paused(self) -> bool:
        """Return True if the process was stopped, as by SIGSTOP: it answers nothing."""
        if self.process is None:
            return False
        try:
            text = Path(f"/proc/{self.process.pid}/stat").read_text()
        except OSError:
            return False
        return text.rpartition(")")[2].split()[0] in "Tt"

    def _send_command(self, *args: Any, **options: Any) -> Any:
        try:
            answer = self._send(*args, **options)
        except Exception as error:
            if not _is_broken_connection(error) or (loss := self.loss(JVM_BROKEN_S)) is None:
                raise
            raise loss from None
        # py4j's answer in place of an error where the connection broke while it waited for one
        if answer == _NO_ANSWER and (loss := self.loss(JVM_BROKEN_S)) is not None:
            raise loss
        return answer

    def _watched_connection(self) -> Any:
        """Return a connection that raises a lost JVM's error, before py4j logs its own."""
        connection = self._connect()
        if "send_command" not in vars(connection):
            connection.send_command = functools.partial(self._send_by, weakref.ref(connection))
        return connection

    def _send_by(self, reference: Callable[[], Any], command: str) -> str:
        connection = reference()
        try:
            return type(connection).send_command(connection, command)
        except Exception as error:
            if not _is_broken_connection(error) or (loss := self.loss(JVM_BROKEN_S)) is None:
                raise
            connection.close(False)
            raise loss from None

    def _refuses(self) -> bool:
        """Return True if nobody listens at the port of the gateway."""
        try:
            socket.create_connection((self._client.address, self._client.port), 2.0).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def _run(self) -> None:
        """Tell the user once that the JVM was stopped, and will answer when it goes on."""
        paused_at = None
        while not self._is_stopped.wait(JVM_LOOK_S) and self.loss() is None:
            if not self.is_paused():
                paused_at = None
            elif paused_at is None:
                paused_at = time.monotonic()
            elif time.monotonic() - paused_at > JVM_STOPPED_S:
                assert self.process is not None
                logger.warning(
                    "Spark's JVM (process %d) was stopped %g s ago, as by SIGSTOP, and this "
                    "program waits for it: kill -CONT %d lets it go on, and kill -9 %d ends it",
                    *(self.process.pid, JVM_STOPPED_S, self.process.pid, self.process.pid),
                )
                paused_at = float("inf")


def _is_broken_connection(error: BaseException) -> bool:
    """Return True for what py4j raises if its JVM does not answer."""
    from py4j.protocol import Py4JJavaError, Py4JNetworkError

    if isinstance(error, Py4JJavaError):
        return False
    return isinstance(error, Py4JNetworkError | OSError | EOFError | AttributeError)


def loss_of(sc: SparkContext | None, patience: float = 0.0) -> SparkLost | None:
    """Return the error that the end of the JVM of a SparkContext is; None if it runs.

    Parameters
    ----------
    sc : pyspark.SparkContext or None
        Other objects, such as a session of Spark Connect, have no JVM here.
    patience : float
        Seconds that it has to end, where its connections are broken.
    """
    gateway = getattr(sc, "_gateway", None)
    watch = None if gateway is None else vars(gateway).get(_WATCH)
    return None if watch is None else watch.loss(patience)


def is_of_connection(error: BaseException) -> bool:
    """Return True for errors that a broken connection to a JVM may be, so its end is worth a wait.

    Rows come by sockets of their own, which say less than py4j.
    """
    text = f"{type(error).__name__} {error}"
    words = ("EOF", "Py4J", "Connection", "socket", "Broken pipe", "Arrow", "receiving")
    return any(word in text for word in words)


def quiet_accumulators(sc: SparkContext) -> None:
    """Keep PySpark's server of accumulators from printing a traceback when the JVM is gone."""
    server = getattr(sc, "_accumulatorServer", None)
    if server is None:
        return
    handle = server.handle_error

    def handle_error(*request: Any) -> None:
        if not isinstance(sys.exc_info()[1], EOFError | OSError):
            handle(*request)

    server.handle_error = handle_error
