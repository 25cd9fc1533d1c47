"""``bigdl-serve``: serve saved models with the Open Inference Protocol over HTTP and gRPC."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import NoReturn

from bigdl.common.checks import check_integer
from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError
from bigdl.common.memory import freeze_modules
from bigdl.common.timeouts import CLOSE_S, REQUESTS_END_S, SILENCE_S
from bigdl.nano.serving.access import read_token
from bigdl.nano.serving.batching import BatchingOptions
from bigdl.nano.serving.process_exit import exit_within, print_line
from bigdl.nano.serving.repository import ModelRepository
from bigdl.nano.serving.server import ModelServer, allow_many_connections
from bigdl.nano.serving.service import ServingLimits
from bigdl.nano.serving.workers import (
    PeerWorkers,
    ServerWorker,
    Workers,
    WorkerStartError,
)

_NAME = "bigdl-serve"
_PORTS = {"http": "--http-port", "grpc": "--grpc-port"}


class _ServeParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {_NAME} -h", code="argument-value")


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = _ServeParser(
        _NAME,
        description="Serves saved models by the Open Inference Protocol over HTTP and gRPC.",
    )
    add = parser.add_argument
    add(
        "directory",
        help="a model that InferenceOptimizer.save wrote, versions of it in 1, 2, …, or a "
        "directory of such models",
    )
    add("--name", help="name of the model, where the directory is one model")
    add("--host", default="127.0.0.1", help="address to listen at (default 127.0.0.1)")
    add("--http-port", type=int, default=8000, help="0: any free port; -1: none")
    add("--grpc-port", type=int, default=8001, help="0: any free port; -1: none")
    add("--max-batch-size", type=int, default=64, help="rows of one call (1: no batching)")
    add("--max-delay-ms", type=float, default=0.0, help="how long a request waits for others")
    add("--max-queue", type=int, default=1024, help="requests of a model that may wait")
    add("--instances", type=int, default=1, help="concurrent calls of a model")
    add("--threads", type=int, help="threads of one call of a model")
    add("--workers", type=int, default=1, help="processes that share the ports")
    add(
        "--worker-timeout",
        type=float,
        default=SILENCE_S,
        metavar="SECONDS",
        help="replace a worker that sends no heartbeat for this time (default 30; 0: never)",
    )
    add("--worker", help=argparse.SUPPRESS)
    add("--inputs", help="inputs of a PyTorch graph, e.g. 'x: FP32[-1,4]'")
    add(
        "--trust",
        action="store_true",
        help="run code in the directory (PyTorch graphs, Lambda layers) that no program of this "
        "user has signed: everyone who can write there can run any code here",
    )
    add("--max-request-bytes", type=int, default=64 << 20)
    add("--max-rows", type=int, default=65_536, help="rows of one request")
    add("--max-answer-bytes", type=int, default=256 << 20)
    add("--max-bytes-at-once", type=int, default=512 << 20, help="bytes of all requests together")
    add("--max-new-tokens", type=int, default=1024, help="generated tokens of one request")
    add("--timeout", type=float, default=60.0, help="seconds that a request may take")
    add("--grpc-threads", type=int, default=64, help="concurrent gRPC requests")
    add(
        "--traffic",
        action="append",
        default=[],
        metavar="MODEL=1:90,2:10",
        help="split the requests of a model among its versions",
    )
    add(
        "--shadow",
        action="append",
        default=[],
        metavar="MODEL=3",
        help="version that receives a copy of every request; its results are discarded",
    )
    add(
        "--reload",
        nargs="?",
        type=float,
        const=2.0,
        metavar="SECONDS",
        help="interval of checks for changes in the directory (default 2)",
    )
    add(
        "--changes",
        "--allow-changes",
        action="store_true",
        default=None,
        help="let clients load and unload models and split requests among versions; if requests "
        "need a token, only with an admin token",
    )
    add(
        "--no-changes",
        dest="changes",
        action="store_false",
        help="refuse changes by clients, the default without an admin token",
    )
    add("--tls-cert", help="PEM file of a certificate")
    add("--tls-key", help="PEM file of its key")
    add(
        "--token-file",
        help="file of the token that requests need; by default the variable BIGDL_SERVE_TOKEN",
    )
    add(
        "--admin-token-file",
        help="file of the token for changes, valid for all requests; by default the variable "
        "BIGDL_SERVE_ADMIN_TOKEN",
    )
    add(
        "--metrics-token-file",
        help="file of the token for /metrics only; by default the variable "
        "BIGDL_SERVE_METRICS_TOKEN; without either, metrics need the token of requests",
    )
    add(
        "--drain-seconds",
        type=float,
        default=0.0,
        help="seconds after SIGTERM during which the server is not ready but answers",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: the command line.

    Returns
    -------
    int
        The exit code; 2 if the server cannot start with these arguments.
    """
    logging.basicConfig(level=logging.INFO, format=f"{_NAME}: %(message)s")
    logging.captureWarnings(True)
    stopped = threading.Event()
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda number, frame: stopped.set())
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = make_parser().parse_args(arguments)
        check_integer("--workers", options.workers, 1, 256)
        if options.worker is None and options.workers > 1:
            return _serve_by_workers(options, arguments, stopped)
        allow_many_connections()
        return _serve(options, stopped)
    except (UsageError, WorkerStartError) as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        return 2


def _serve(options: argparse.Namespace, stopped: threading.Event) -> int:
    """Serve in this process, which may be one of several workers."""
    worker = None if options.worker is None else ServerWorker.from_json(options.worker)
    if worker is not None:
        options.http_port = worker.ports.get(_PORTS["http"], -1)
        options.grpc_port = worker.ports.get(_PORTS["grpc"], -1)
        options.threads = options.threads or max(1, core_count() // worker.count)
    server = started_server(options, shares_port=worker is not None)
    peers = None if worker is None else PeerWorkers(worker, server.service)
    repository = server.repository
    freeze_modules()  # else garbage collection of module objects delays some requests
    served = ", ".join(
        f"{name} {'/'.join(repository.versions(name))}" for name in repository.names()
    )
    if worker is None:
        ports = {"http": server.http_port, "grpc": server.grpc_port}
        print(f"{_NAME}: {served} at {_addresses(options.host, ports)}", flush=True)
    else:
        print(f"ready {served}", flush=True)
    stopped.wait()
    exit_within(options.drain_seconds + REQUESTS_END_S + CLOSE_S, _NAME)
    if options.drain_seconds:
        server.drain(options.drain_seconds)
    server.close()
    if peers is not None:
        peers.close()
    print_line(f"{_NAME}: ended")
    return 0


def _serve_by_workers(
    options: argparse.Namespace, arguments: Sequence[str], stopped: threading.Event
) -> int:
    """Start worker processes that serve, and supervise them."""
    wanted = {_PORTS["http"]: options.http_port, _PORTS["grpc"]: options.grpc_port}
    ports = {name: port for name, port in wanted.items() if port >= 0}
    if not ports:
        raise UsageError(
            "Pass a port for HTTP or for gRPC; a server without one is of no use",
            code="argument-missing",
            argument="--http-port",
        )
    grace = options.drain_seconds + REQUESTS_END_S
    command = [sys.executable, "-m", "bigdl.nano.serving.main", *arguments]
    with Workers(
        command, options.workers, options.host, ports, grace, options.worker_timeout
    ) as workers:
        listening = {scheme: workers.ports.get(name) for scheme, name in _PORTS.items()}
        address = _addresses(options.host, listening)
        print(f"{_NAME}: {workers.ready} at {address}, {options.workers} workers", flush=True)
        stopped.wait()
    print(f"{_NAME}: ended", flush=True)
    return 0


def _addresses(host: str, ports: Mapping[str, int | None]) -> str:
    return " and ".join(f"{scheme}://{host}:{port}" for scheme, port in ports.items() if port)


def started_server(options: argparse.Namespace, *, shares_port: bool) -> ModelServer:
    if (options.tls_cert is None) != (options.tls_key is None):
        raise UsageError("TLS needs both --tls-cert and --tls-key", code="argument-missing")
    repository = ModelRepository(
        options.directory,
        name=options.name,
        batching=BatchingOptions(
            options.max_batch_size, options.max_delay_ms, options.max_queue, options.instances
        ),
        thread_num=options.threads,
        inputs=options.inputs,
        trust=options.trust,
    )
    limits = ServingLimits(
        options.max_request_bytes,
        options.max_rows,
        options.timeout,
        max_answer_bytes=options.max_answer_bytes,
        max_bytes_at_once=options.max_bytes_at_once,
        max_new_tokens=options.max_new_tokens,
    )
    token = _token("BIGDL_SERVE_TOKEN", options.token_file)
    admin_token = _token("BIGDL_SERVE_ADMIN_TOKEN", options.admin_token_file)
    metrics_token = _token("BIGDL_SERVE_METRICS_TOKEN", options.metrics_token_file)
    repository.load_all(keep_going=True)
    shadows = dict(_assignment("--shadow", each) for each in options.shadow)
    shares = {
        name: _shares(text)
        for name, text in (_assignment("--traffic", each) for each in options.traffic)
    }
    for name in shares | shadows:
        repository.set_traffic(name, shares.get(name), shadows.get(name))
    return ModelServer(
        repository,
        host=options.host,
        http_port=None if options.http_port < 0 else options.http_port,
        grpc_port=None if options.grpc_port < 0 else options.grpc_port,
        limits=limits,
        token=token,
        admin_token=admin_token,
        metrics_token=metrics_token,
        tls=None if options.tls_cert is None else (options.tls_cert, options.tls_key),
        changes=options.changes,
        reload_seconds=options.reload,
        grpc_threads=options.grpc_threads,
        shares_port=shares_port,
    )


def _token(variable: str, file: str | None) -> str | None:
    if file is not None:
        return read_token(file)
    token = os.environ.get(variable)
    if token is not None and not token.strip():  # e.g. from a missing secret
        raise UsageError(
            f"The variable {variable} is set but holds no token; unset it if requests need none",
            code="argument-value",
            argument=variable,
        )
    return token


def _assignment(option: str, text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    if not name or not value:
        raise UsageError(
            f"{option} must have the form MODEL=…, got {text!r}",
            code="argument-value",
            argument=option,
        )
    return name, value


def _shares(text: str) -> dict[str, float]:
    shares = {}
    for each in text.split(","):
        version, _, share = each.partition(":")
        try:
            shares[version.strip()] = float(share)
        except ValueError:
            raise UsageError(
                f"--traffic must have the form MODEL=1:90,2:10, got {text!r}",
                code="argument-value",
                argument="--traffic",
            ) from None
    return shares


if __name__ == "__main__":
    sys.exit(main())
