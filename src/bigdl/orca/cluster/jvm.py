"""Detection of the end of the driver's JVM.

A :class:`JvmWatch` is attached to a py4j gateway.  Calls into a lost JVM then raise a
:class:`SparkLost` with one sentence instead of py4j's socket errors.  Code that reads from other
connections of the JVM calls :func:`loss_of`.
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
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError
from bigdl.common.platform.processes import is_stopped
from bigdl.common.timeouts import JVM_BROKEN_S, JVM_LOOK_S, JVM_STOPPED_S
from bigdl.runtime.process import exit_message

if TYPE_CHECKING:
    from py4j.java_gateway import GatewayConnection, JavaGateway
    from pyspark import SparkContext

logger = logging.getLogger("bigdl.orca")

_WATCH = "_bigdl_watch"  # attribute of a gateway
_NO_RESPONSE = "x"
_ADVICE = "call stop_orca_context and init_orca_context, and create its objects again"


class SparkLost(UsageError):
    """Error raised when Spark's JVM, or the cluster that was started with it, is gone."""

    code = "context-stopped"


class JvmWatch:
    """Monitor that reports the end of a JVM as a :class:`SparkLost` error.

    Parameters
    ----------
    gateway : py4j.java_gateway.JavaGateway
        PySpark's gateway. Its attribute ``proc`` is the JVM process; programs started by
        ``spark-submit`` have none.
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
        """Return the JvmWatch of a gateway; the first call creates it."""
        return vars(gateway).get(_WATCH) or vars(gateway).setdefault(_WATCH, cls(gateway))

    def expect_end(self) -> None:
        """Record that this program itself stops the JVM."""
        self._is_stopped.set()

    def end(self, reason: str) -> None:
        """Kill a JVM that is unusable.

        Parameters
        ----------
        reason : str
            Reason for the error message, in place of the sentence about the JVM.
        """
        if self.process is not None and not self._is_stopped.is_set() and not self._reason:
            self._reason = reason
            self.process.kill()

    def loss(self, timeout: float = 0.0) -> SparkLost | None:
        """Return the error for a lost JVM, or None if it is running or this program stopped it.

        Parameters
        ----------
        timeout : float
            Seconds to wait for its end, if its connections are broken.
        """
        if self._is_stopped.is_set():
            return None
        if self.process is None:
            return SparkLost(f"Spark's JVM is gone; {_ADVICE}") if self._refuses() else None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout) if timeout else self.process.poll()
        code = self.process.returncode
        if code is None or self._is_stopped.is_set():
            return None
        ending = exit_message(code) if code < 0 else f"ended with exit code {code}"
        reason = self._reason or f"Spark's JVM (process {self.process.pid}) is gone: it {ending}"
        return SparkLost(f"{reason}; {_ADVICE}")

    def is_paused(self) -> bool:
        """Return True if the process is stopped, e.g. by SIGSTOP, and cannot respond."""
        if self.process is None:
            return False
        return is_stopped(self.process.pid)

    def _send_command(self, *args: object, **options: object) -> str:
        try:
            response = self._send(*args, **options)
        except Exception as error:
            if not _is_broken_connection(error) or (loss := self.loss(JVM_BROKEN_S)) is None:
                raise
            raise loss from None
        # py4j returns this if the connection broke while waiting for the response
        if response == _NO_RESPONSE and (loss := self.loss(JVM_BROKEN_S)) is not None:
            raise loss
        return response

    def _watched_connection(self) -> GatewayConnection:
        """Return a connection that raises SparkLost before py4j logs a socket error."""
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
        """Return True if no process listens on the gateway's port."""
        try:
            socket.create_connection((self._client.address, self._client.port), 2.0).close()
        except ConnectionRefusedError:
            return True
        except OSError:
            pass
        return False

    def _run(self) -> None:
        """Warn once if the JVM is paused for some time."""
        paused_at = None
        while not self._is_stopped.wait(JVM_LOOK_S) and self.loss() is None:
            if not self.is_paused():
                paused_at = None
            elif paused_at is None:
                paused_at = time.monotonic()
            elif time.monotonic() - paused_at > JVM_STOPPED_S:
                assert self.process is not None
                logger.warning(
                    "Spark's JVM (process %d) was paused %g s ago, e.g. by SIGSTOP, and this "
                    "program waits for it: kill -CONT %d resumes it, and kill -9 %d ends it",
                    *(self.process.pid, JVM_STOPPED_S, self.process.pid, self.process.pid),
                )
                paused_at = float("inf")


def _is_broken_connection(error: BaseException) -> bool:
    """Return True for errors that py4j raises if its JVM does not respond."""
    from py4j.protocol import Py4JJavaError, Py4JNetworkError

    if isinstance(error, Py4JJavaError):
        return False
    return isinstance(error, Py4JNetworkError | OSError | EOFError | AttributeError)


def loss_of(sc: SparkContext | None, timeout: float = 0.0) -> SparkLost | None:
    """Return the error for the lost JVM of a SparkContext, or None if it is running.

    Parameters
    ----------
    sc : pyspark.SparkContext or None
        Other objects, such as a Spark Connect session, have no local JVM.
    timeout : float
        Seconds to wait for its end, if its connections are broken.
    """
    gateway = getattr(sc, "_gateway", None)
    watch = None if gateway is None else vars(gateway).get(_WATCH)
    return None if watch is None else watch.loss(timeout)


def may_be_lost_connection(error: BaseException) -> bool:
    """Return True for errors that a broken JVM connection can cause.

    It is then worth waiting for the JVM's end.  Rows use separate sockets, whose errors say less
    than py4j's.
    """
    text = f"{type(error).__name__} {error}"
    words = ("EOF", "Py4J", "Connection", "socket", "Broken pipe", "Arrow", "receiving")
    return any(word in text for word in words)


def quiet_accumulators(sc: SparkContext) -> None:
    """Suppress the traceback of PySpark's accumulator server when the JVM is gone."""
    server = getattr(sc, "_accumulatorServer", None)
    if server is None:
        return
    handle = server.handle_error

    def handle_error(*request: object) -> None:
        if not isinstance(sys.exc_info()[1], EOFError | OSError):
            handle(*request)

    server.handle_error = handle_error
