"""ModelServer: HTTP and gRPC servers for the models of a repository."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

from bigdl.common.checks import check_number, check_positive
from bigdl.common.errors import UsageError
from bigdl.common.platform.processes import open_file_limits, set_open_file_limit
from bigdl.common.timeouts import REQUESTS_END_S
from bigdl.nano.serving.access import Security
from bigdl.nano.serving.grpc_server import GrpcServer
from bigdl.nano.serving.grpc_service import InferenceHandlers
from bigdl.nano.serving.http_app import HttpApp
from bigdl.nano.serving.http_messages import Handler
from bigdl.nano.serving.http_thread import HttpThread
from bigdl.nano.serving.limits import ServingLimits
from bigdl.nano.serving.repository import ModelRepository
from bigdl.nano.serving.service import InferenceService

if TYPE_CHECKING:
    import grpc

__all__ = ["ModelServer"]


class ModelServer:
    """Server of the Open Inference Protocol over HTTP and gRPC, in threads of this process.

    It listens on the loopback address by default. Closing the server closes the repository.

    Parameters
    ----------
    models : ModelRepository, or str or path
        Repository, or the path of a saved model or a directory of saved models, which are loaded.
    host : str
        Address to listen on. Use TLS if other machines can reach it.
    http_port, grpc_port : int or None
        0: any free port; None: do not listen.
    limits : ServingLimits, optional
    token : str, optional
        If set, requests need the header ``Authorization: Bearer <token>``.
    admin_token, metrics_token : str, optional
        Tokens for requests that change the models, and for ``/metrics``. The admin token is valid
        for all requests. Without `metrics_token` the metrics need `token`.
    tls : (str, str), optional
        PEM files of a certificate and its key.
    changes : bool, optional
        True lets clients load and unload models and set the traffic of versions; if there is a
        `token`, this needs an `admin_token`. Default: allowed only with an admin token.
    reload_seconds : float, optional
        Interval of checks for changes in the directory. Default: no checks.
    grpc_threads : int
        Number of concurrent gRPC requests.
    routes : mapping, optional
        Further HTTP handlers; see :class:`HttpApp`.
    grpc_handlers : sequence, optional
        Handlers of further gRPC services.
    shares_port : bool, default False
        Bind with ``SO_REUSEPORT``, so that several processes listen on the ports and the kernel
        distributes the connections.

    Attributes
    ----------
    repository : ModelRepository
    service : InferenceService
    http_port, grpc_port : int or None
        Ports that the server listens on.

    Raises
    ------
    UsageError
        If a model cannot be loaded or a port is in use.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.nano.serving import Client, ModelRepository, ModelServer, ServedModel
    >>> repository = ModelRepository()
    >>> deployed = repository.add("relu", ServedModel(torch.nn.ReLU(), sample=torch.ones(1, 2)))
    >>> with ModelServer(repository, http_port=0, grpc_port=0) as server:
    ...     with Client(f"http://127.0.0.1:{server.http_port}") as client:
    ...         client.infer("relu", np.array([[-1, 2]], "float32"))
    array([[0., 2.]], dtype=float32)
    """

    def __init__(
        self,
        models: ModelRepository | str | os.PathLike,
        *,
        host: str = "127.0.0.1",
        http_port: int | None = 8000,
        grpc_port: int | None = 8001,
        limits: ServingLimits | None = None,
        token: str | None = None,
        tls: tuple[str | os.PathLike, str | os.PathLike] | None = None,
        changes: bool | None = None,
        reload_seconds: float | None = None,
        grpc_threads: int = 64,
        routes: Mapping[tuple[str, str], Handler] | None = None,
        grpc_handlers: Sequence[grpc.GenericRpcHandler] = (),
        shares_port: bool = False,
        admin_token: str | None = None,
        metrics_token: str | None = None,
    ):
        if http_port is None and grpc_port is None:
            raise UsageError(
                "Pass a port for HTTP or for gRPC; a server without one is of no use",
                code="argument-missing",
            )
        check_positive("grpc_threads", grpc_threads)
        if reload_seconds is not None:
            check_number("reload_seconds", reload_seconds, above=0)
        certificate = (None, None) if tls is None else _tls_files(tls)
        security = Security(
            host,
            expose=True,
            certificate=certificate[0],
            key=certificate[1],
            token=token,
            admin_token=admin_token,
            metrics_token=metrics_token,
            changes=changes,
        )
        self._http: HttpThread | None = None
        self._grpc: GrpcServer | None = None
        self._closed = False
        if isinstance(models, ModelRepository):
            self.repository = models
        else:
            self.repository = ModelRepository(models)
            self.repository.load_all()
        limits = limits or ServingLimits()
        self.service = InferenceService(
            self.repository, limits, tokens=security.tokens, changes=security.allows_changes
        )
        try:
            if http_port is not None:
                app = HttpApp(self.service, routes)
                self._http = HttpThread(app, host, http_port, security.files(), shares_port)
            if grpc_port is not None:
                self._grpc = GrpcServer(
                    [InferenceHandlers(self.service)],
                    grpc_port,
                    security,
                    limits,
                    grpc_threads,
                    shares_port,
                    is_ready=lambda: self.service.ready,
                    handlers=grpc_handlers,
                )
            if self._http is not None:
                self._http.start()
        except BaseException:
            self.close(0)
            raise
        if reload_seconds is not None:
            self.repository.watch(reload_seconds)

    @property
    def http_port(self) -> int | None:
        """Port of the HTTP server."""
        return None if self._http is None else self._http.port

    @property
    def grpc_port(self) -> int | None:
        """Port of the gRPC server."""
        return None if self._grpc is None else self._grpc.port

    def close(self, seconds: float = REQUESTS_END_S) -> None:
        """Refuse new requests, finish running ones, and close the models.

        Parameters
        ----------
        seconds : float
            Seconds that running requests may take.
        """
        if self._closed:
            return
        self._closed = self.service.draining = True
        stopping = []
        for each in (self._http, self._grpc):
            if each is not None:
                stopping.append(threading.Thread(target=each.stop, args=(seconds,)))
                stopping[-1].start()
        for thread in stopping:
            thread.join()
        self.repository.close()

    def drain(self, seconds: float) -> None:
        """Report the server as not ready for `seconds`, while it continues to answer requests.

        Use it before :meth:`close`, so that load balancers send new requests elsewhere.
        """
        self.service.draining = True
        time.sleep(seconds)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _tls_files(tls: Sequence[str | os.PathLike]) -> tuple[str, str]:
    if not isinstance(tls, Sequence) or len(tls) != 2:
        raise UsageError(
            "tls must be a pair of files: a certificate and its key",
            code="argument-type",
            argument="tls",
        )
    return str(tls[0]), str(tls[1])


def allow_many_connections() -> None:
    """Raise the process's soft limit of open files, which limits the number of connections."""
    soft, hard = open_file_limits()
    if soft is None:
        return
    wanted = 1 << 16 if hard is None else min(hard, 1 << 16)
    with suppress(ValueError, OSError):
        set_open_file_limit(max(soft, wanted))
