"""InferenceHandlers: the Open Inference Protocol over gRPC."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from bigdl.common.errors import require
from bigdl.nano.serving import open_inference as protocol
from bigdl.nano.serving.access import ADMIN
from bigdl.nano.serving.future_awaiter import FutureAwaiter
from bigdl.nano.serving.grpc_port import GrpcCall, GrpcRefusal, not_a_message
from bigdl.nano.serving.http_app import server_metadata
from bigdl.nano.serving.messages import (
    METHODS,
    SERVICE,
    check_fields,
    describe_tensor,
    messages,
    parameters_of,
    read_tensors,
)
from bigdl.nano.serving.protos import Message
from bigdl.nano.serving.repository import UnknownModelError
from bigdl.nano.serving.service import InferenceService
from bigdl.nano.serving.statuses import ERROR, status_of

if TYPE_CHECKING:
    import grpc

    from bigdl.nano.serving.signature import Signature

__all__ = ["InferenceHandlers"]

T = TypeVar("T")

_log = logging.getLogger(__name__)
_SMALL = 64 << 10  # bytes; smaller messages are decoded and encoded in the event loop


class InferenceHandlers:
    """Methods of the Open Inference Protocol for a :class:`GrpcServer`.

    Parameters
    ----------
    service : InferenceService
    """

    name = SERVICE
    purposes: Mapping[str, str] = {"RepositoryModelLoad": ADMIN, "RepositoryModelUnload": ADMIN}
    open_methods: Sequence[str] = ("ServerLive", "ServerReady")
    quick_methods: Sequence[str] = (
        "ServerMetadata",
        "ModelReady",
        "ModelMetadata",
        "RepositoryIndex",
    )
    checks_changes = True  # InferenceService.check_changes

    def __init__(self, service: InferenceService):
        self._grpc = require("grpc", "serving")
        self._results = FutureAwaiter()
        self.service = service

    def handler(self) -> grpc.GenericRpcHandler:
        """Return the ``grpc.GenericRpcHandler`` of the protocol.

        Requests about the server alone are answered without reading their message. Inference waits
        for the model in the event loop; other methods run in threads.
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
                    self._without_message(empty[name]),
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

    def _without_message(
        self, answer: Callable[[], Message]
    ) -> Callable[[Message, object], object]:
        """Return a handler that answers without waiting for the request's message."""

        async def answered(requests: object, context: object) -> Message:
            return answer()

        return answered

    def _guarded(
        self, name: str, method: Callable[[Message], Message]
    ) -> Callable[[Message, object], object]:
        """Wrap `method` so that its errors become gRPC statuses."""

        def answer(request: Message, context: object) -> Message:
            try:
                return method(request)
            except Exception as error:
                raise _refusal(name, error) from None

        return answer

    def _server_live(self) -> Message:
        return messages()["ServerLiveResponse"](live=True)

    def _server_ready(self) -> Message:
        return messages()["ServerReadyResponse"](ready=self.service.ready)

    def _server_metadata(self) -> Message:
        return messages()["ServerMetadataResponse"](**server_metadata())

    def _ModelReady(self, request: Message) -> Message:
        try:
            self.service.repository.find(request.name, request.version)
        except UnknownModelError:
            return messages()["ModelReadyResponse"](ready=False)
        return messages()["ModelReadyResponse"](ready=True)

    def _ModelMetadata(self, request: Message) -> Message:
        repository, name = self.service.repository, request.name
        model = repository.find(name, request.version).model
        versions = [request.version] if request.version else repository.versions(name)
        described = protocol.model_metadata(name, versions, model.platform, model.signature)
        return messages()["ModelMetadataResponse"](**described)

    async def _model_infer(self, content: bytes, call: GrpcCall) -> bytes:
        try:
            with self.service.bytes_at_once.reservation() as reserve:
                reserve(len(content))
                return await self._inferred(content, call)
        except GrpcRefusal:
            raise
        except Exception as error:
            raise _refusal("ModelInfer", error) from None

    async def _inferred(self, content: bytes, call: GrpcCall) -> bytes:
        """Run an inference request; large messages are decoded and encoded in threads."""
        self.service.loops.add(asyncio.get_running_loop())
        service, begin, is_small = self.service, time.monotonic(), len(content) <= _SMALL

        async def run(function: Callable[..., T], *arguments: object) -> T:
            return function(*arguments) if is_small else await call.run(function, *arguments)

        request = await run(_parsed, content)
        name, metadata = request.model_name, dict(call.invocation_metadata())
        version = request.model_version or metadata.get("x-model-version")
        with (
            service.trace_request(name, version, "grpc") as request_trace,
            service.repository.lease(name, version, metadata.get("x-request-key")) as deployed,
        ):
            request_trace.deployed, served = deployed, deployed.model
            with request_trace.stage("decode"):
                most = service.limits.max_rows
                infer_request, selected, arrays = await run(
                    _decoded, request, served.signature, most
                )
            request_trace.mirror(arrays)
            times = [
                each for each in (infer_request.timeout, call.time_remaining()) if each is not None
            ]
            seconds = service.seconds_of(min(times, default=None))
            left = max(seconds - (time.monotonic() - begin), 0.0)
            future = served.submit(arrays, left)
            results = await self._results.within(future, left, seconds)
            with request_trace.stage("encode"):
                is_small = sum(results[position].nbytes for position, _ in selected) <= _SMALL
                most = service.limits.max_answer_bytes
                protocol.check_answer(selected, results, most)
                return await run(_encoded, infer_request, selected, results, name, deployed.version)

    def _RepositoryIndex(self, request: Message) -> Message:
        entries = self.service.repository.index()
        models = [e for e in entries if not request.ready or e["state"] == "READY"]
        return messages()["RepositoryIndexResponse"](models=models)

    def _RepositoryModelLoad(self, request: Message) -> Message:
        self.service.change("load", request.model_name)
        return messages()["RepositoryModelLoadResponse"]()

    def _RepositoryModelUnload(self, request: Message) -> Message:
        self.service.change("unload", request.model_name)
        return messages()["RepositoryModelUnloadResponse"]()


def _refusal(name: str, error: Exception) -> GrpcRefusal:
    """Return the gRPC refusal for an error, and log unexpected errors."""
    status, sentence = status_of(error), str(error)
    if status is ERROR:
        _log.error("A call of %s failed", name, exc_info=error)
        sentence = "The server failed; its log has the details"
    return GrpcRefusal(status.grpc, sentence)


def _parsed(content: bytes) -> Message:
    """Parse the bytes of a ``ModelInferRequest``."""
    check_fields(content)
    try:
        return messages()["ModelInferRequest"].FromString(content)
    except Exception:  # protobuf raises various errors for bytes that are no message
        raise not_a_message(f"/{SERVICE}/ModelInfer") from None


def _decoded(
    request: Message, signature: Signature, most_rows: int
) -> tuple[protocol.InferRequest, list[tuple[int, protocol.RequestedOutput]], list[np.ndarray]]:
    """Return the decoded request, the requested outputs with their positions, and the inputs."""
    inputs = read_tensors(request.inputs, request.raw_input_contents, signature, most_rows)
    for each in request.outputs:
        protocol.refuse_output_parameters(each.name, each.parameters)
    infer_request = protocol.InferRequest(
        inputs,
        [protocol.RequestedOutput(each.name, True) for each in request.outputs],
        id=request.id,
        timeout=protocol.timeout_of(parameters_of(request)),
    )
    selected = infer_request.select_outputs(signature)
    return infer_request, selected, protocol.strict_inputs(signature, inputs, most_rows)


def _encoded(
    infer_request: protocol.InferRequest,
    selected: list[tuple[int, protocol.RequestedOutput]],
    results: list[np.ndarray],
    name: str,
    version: str,
) -> bytes:
    """Return the bytes of a ``ModelInferResponse``."""
    answer = messages()["ModelInferResponse"](
        model_name=name, model_version=version, id=infer_request.id
    )
    for position, output in selected:
        array = results[position]
        describe_tensor(answer.outputs.add(), output.name, array)
        answer.raw_output_contents.append(protocol.to_bytes(array))
    return answer.SerializeToString()
