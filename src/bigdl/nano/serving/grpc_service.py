"""GrpcServer: the Open Inference Protocol over gRPC."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bigdl.common.errors import require
from bigdl.nano.serving import open_inference as protocol
from bigdl.nano.serving.access import ADMIN, INFER
from bigdl.nano.serving.grpc_port import Call, GrpcPort, GrpcRefusal, not_a_message
from bigdl.nano.serving.http_app import _Results, server_metadata
from bigdl.nano.serving.messages import (
    METHODS,
    SERVICE,
    check_fields,
    describe_tensor,
    messages,
    parameters_of,
    read_tensors,
)
from bigdl.nano.serving.repository import UnknownModelError
from bigdl.nano.serving.service import InferenceService, code_of

__all__ = ["GrpcServer", "InferenceHandlers"]

_log = logging.getLogger(__name__)
_WAITING_FOR_EACH_THREAD = 32
_SMALL = 64 << 10  # bytes of a message that are read or written at once, in the event loop
OPEN_METHODS = [f"/{SERVICE}/{name}" for name in ("ServerLive", "ServerReady")]
QUICK_METHODS = [
    f"/{SERVICE}/{name}"
    for name in ("ServerMetadata", "ModelReady", "ModelMetadata", "RepositoryIndex")
]
ADMIN_METHODS = [f"/{SERVICE}/{name}" for name in ("RepositoryModelLoad", "RepositoryModelUnload")]
_STATUS = {
    "not_found": "NOT_FOUND",
    "denied": "PERMISSION_DENIED",
    "bad_request": "INVALID_ARGUMENT",
    "overloaded": "RESOURCE_EXHAUSTED",
    "unavailable": "UNAVAILABLE",
    "deadline": "DEADLINE_EXCEEDED",
    "error": "INTERNAL",
}


def purpose_of(path: str) -> str:
    """Return what a method of the protocol is for."""
    return ADMIN if path in ADMIN_METHODS else INFER


class InferenceHandlers:
    """The methods of the protocol for a :class:`GrpcPort`.

    Parameters
    ----------
    service : InferenceService
    """

    name = SERVICE

    def __init__(self, service: InferenceService):
        self._grpc = require("grpc", "serving")
        self._results = _Results()
        self.service = service

    def handler(self) -> Any:
        """Return what a :class:`GrpcPort` takes.

        What asks about the server alone is answered without its message. Inference waits for the
        model in the event loop, and all else in threads.
        """
        grpc, made = self._grpc, messages()
        empty = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ServerMetadata": self._server_metadata,
        }
        methods = {}
        for name in METHODS:
            if name in empty:
                methods[name] = grpc.stream_unary_rpc_method_handler(
                    self._unasked(empty[name]),
                    response_serializer=made[f"{name}Response"].SerializeToString,
                )
            elif name == "ModelInfer":
                methods[name] = grpc.unary_unary_rpc_method_handler(self._model_infer)
            else:
                methods[name] = grpc.unary_unary_rpc_method_handler(
                    self._guarded(name, getattr(self, f"_{name}")),
                    request_deserializer=made[f"{name}Request"].FromString,
                    response_serializer=made[f"{name}Response"].SerializeToString,
                )
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _unasked(self, answer: Callable[[], Any]) -> Callable[[Any, Any], Any]:
        """A method whose request says nothing, so nobody waits for it."""

        async def answered(requests: Any, context: Any) -> Any:
            return answer()

        return answered

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        """A method that answers errors by their status."""

        def answer(request: Any, context: Any) -> Any:
            try:
                return method(request)
            except Exception as error:
                raise _refusal(name, error) from None

        return answer

    def _server_live(self) -> Any:
        return messages()["ServerLiveResponse"](live=True)

    def _server_ready(self) -> Any:
        return messages()["ServerReadyResponse"](ready=self.service.ready)

    def _server_metadata(self) -> Any:
        return messages()["ServerMetadataResponse"](**server_metadata())

    def _ModelReady(self, request: Any) -> Any:
        try:
            self.service.repository.find(request.name, request.version)
        except UnknownModelError:
            return messages()["ModelReadyResponse"](ready=False)
        return messages()["ModelReadyResponse"](ready=True)

    def _ModelMetadata(self, request: Any) -> Any:
        repository, name = self.service.repository, request.name
        model = repository.find(name, request.version).model
        versions = [request.version] if request.version else repository.versions(name)
        described = protocol.model_metadata(name, versions, model.platform, model.signature)
        return messages()["ModelMetadataResponse"](**described)

    async def _model_infer(self, content: bytes, call: Call) -> bytes:
        try:
            with self.service.bytes_at_once.holding() as hold:
                hold(len(content))
                return await self._inferred(content, call)
        except GrpcRefusal:
            raise
        except Exception as error:
            raise _refusal("ModelInfer", error) from None

    async def _inferred(self, content: bytes, call: Call) -> bytes:
        """Answer a request in the event loop; what is large is read and written in threads."""
        self.service.loops.add(asyncio.get_running_loop())
        service, begin, is_small = self.service, time.monotonic(), len(content) <= _SMALL

        async def run(function: Callable[..., Any], *arguments: Any) -> Any:
            return function(*arguments) if is_small else await call.run(function, *arguments)

        request = await run(_parsed, content)
        name, metadata = request.model_name, dict(call.invocation_metadata())
        version = request.model_version or metadata.get("x-model-version")
        with (
            service.answering(name, version, "grpc") as answering,
            service.repository.lease(name, version, metadata.get("x-request-key")) as deployed,
        ):
            answering.deployed, served = deployed, deployed.model
            with answering.stage("decode"):
                most = service.limits.max_rows
                asked, wanted, arrays = await run(_decoded, request, served.signature, most)
            answering.mirror(arrays)
            times = [each for each in (asked.timeout, call.time_remaining()) if each is not None]
            seconds = service.seconds_of(min(times, default=None))
            left = max(seconds - (time.monotonic() - begin), 0.0)
            future = served.submit(arrays, left)
            results = await self._results.within(future, left, seconds)
            with answering.stage("encode"):
                is_small = sum(results[position].nbytes for position, _ in wanted) <= _SMALL
                most = service.limits.max_answer_bytes
                protocol.check_answer(wanted, results, most)
                return await run(_encoded, asked, wanted, results, name, deployed.version)

    def _RepositoryIndex(self, request: Any) -> Any:
        entries = self.service.repository.index()
        models = [e for e in entries if not request.ready or e["state"] == "READY"]
        return messages()["RepositoryIndexResponse"](models=models)

    def _RepositoryModelLoad(self, request: Any) -> Any:
        self.service.change("load", request.model_name)
        return messages()["RepositoryModelLoadResponse"]()

    def _RepositoryModelUnload(self, request: Any) -> Any:
        self.service.change("unload", request.model_name)
        return messages()["RepositoryModelUnloadResponse"]()


def _refusal(name: str, error: Exception) -> GrpcRefusal:
    """Return how an error is answered; one of the server's own is logged."""
    code, sentence = code_of(error), str(error)
    if code == "error":
        _log.error("A call of %s failed", name, exc_info=error)
        sentence = "The server has failed; its log says why"
    return GrpcRefusal(_STATUS[code], sentence)


def _parsed(content: bytes) -> Any:
    """Return the request in the bytes of a message."""
    check_fields(content)
    try:
        return messages()["ModelInferRequest"].FromString(content)
    except Exception:  # whatever protobuf says of bytes that are no message
        raise not_a_message(f"/{SERVICE}/ModelInfer") from None


def _decoded(
    request: Any, signature: Any, most_rows: int
) -> tuple[protocol.InferRequest, list[tuple[int, Any]], list[np.ndarray]]:
    """Return the request, its outputs by their positions, and the model's inputs."""
    inputs = read_tensors(request.inputs, request.raw_input_contents, signature, most_rows)
    for each in request.outputs:
        protocol.refuse_output_parameters(each.name, each.parameters)
    asked = protocol.InferRequest(
        inputs,
        [protocol.RequestedOutput(each.name, True) for each in request.outputs],
        id=request.id,
        timeout=protocol.timeout_of(parameters_of(request)),
    )
    wanted = asked.wanted(signature)
    return asked, wanted, protocol.strict_inputs(signature, inputs, most_rows)


def _encoded(
    asked: protocol.InferRequest,
    wanted: list[tuple[int, Any]],
    results: list[np.ndarray],
    name: str,
    version: str,
) -> bytes:
    """Return the bytes of an answer."""
    answer = messages()["ModelInferResponse"](model_name=name, model_version=version, id=asked.id)
    for position, output in wanted:
        array = results[position]
        describe_tensor(answer.outputs.add(), output.name, array)
        answer.raw_output_contents.append(protocol.to_bytes(array))
    return answer.SerializeToString()


class GrpcServer:
    """A server for gRPC, in the event loop and the threads of a :class:`GrpcPort`.

    Parameters
    ----------
    service : InferenceService
    host : str
    port : int
        0 means any that is free.
    threads : int
        For messages that are large, for loading, and for further services; 32 times as many
        requests may be answered or wait.
    pem : (bytes, bytes), optional
        Key and certificate, for TLS.
    handlers : sequence of grpc.GenericRpcHandler, optional
        Of further services.
    shares_port : bool, default False
        Other processes listen on the port, too.

    Attributes
    ----------
    port : int
    """

    def __init__(
        self,
        service: InferenceService,
        host: str,
        port: int,
        *,
        threads: int = 64,
        pem: tuple[bytes, bytes] | None = None,
        handlers: Sequence[Any] = (),
        shares_port: bool = False,
    ):
        self._port = GrpcPort(
            host,
            port,
            [InferenceHandlers(service).handler(), *handlers],
            threads=threads,
            most_requests=threads * _WAITING_FOR_EACH_THREAD,
            most_bytes=service.limits.max_request_bytes,
            check_access=lambda given, path: service.check_access(given, purpose_of(path)),
            open_methods=OPEN_METHODS,
            quick_methods=QUICK_METHODS,
            pem=pem,
            shares_port=shares_port,
        )
        self.port: int = self._port.port

    def start(self) -> None:
        """Answer requests from now on."""
        self._port.start()

    def stop(self, seconds: float) -> None:
        """Take no more requests, and give those under way so many seconds."""
        self._port.stop(seconds)
