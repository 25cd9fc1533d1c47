"""GrpcServer: the Open Inference Protocol over gRPC."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from bigdl.common.errors import require
from bigdl.nano.serving import open_inference as protocol
from bigdl.nano.serving.grpc_port import GrpcPort
from bigdl.nano.serving.http_app import server_metadata
from bigdl.nano.serving.messages import (
    METHODS,
    SERVICE,
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
OPEN_METHODS = [f"/{SERVICE}/{name}" for name in ("ServerLive", "ServerReady")]
_STATUS = {
    "not_found": "NOT_FOUND",
    "denied": "PERMISSION_DENIED",
    "bad_request": "INVALID_ARGUMENT",
    "overloaded": "RESOURCE_EXHAUSTED",
    "unavailable": "UNAVAILABLE",
    "deadline": "DEADLINE_EXCEEDED",
    "error": "INTERNAL",
}


class InferenceHandlers:
    """The methods of the protocol for a server of gRPC.

    Parameters
    ----------
    service : InferenceService
    """

    name = SERVICE

    def __init__(self, service: InferenceService):
        self._grpc = require("grpc", "serving")
        self.service = service

    def handler(self) -> Any:
        """Return what a server of gRPC takes."""
        grpc, made = self._grpc, messages()
        methods = {
            name: grpc.unary_unary_rpc_method_handler(
                self._guarded(name, getattr(self, f"_{name}")),
                request_deserializer=made[f"{name}Request"].FromString,
                response_serializer=made[f"{name}Response"].SerializeToString,
            )
            for name in METHODS
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def _guarded(self, name: str, method: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        """A method that answers errors by their status."""
        status = self._grpc.StatusCode

        def answer(request: Any, context: Any) -> Any:
            try:
                return method(request, context)
            except Exception as error:
                code = code_of(error)
                sentence = str(error)
                if code == "error":
                    _log.exception("A call of %s failed", name)
                    sentence = "The server has failed; its log says why"
                context.abort(getattr(status, _STATUS[code]), sentence)

        return answer

    def _ServerLive(self, request: Any, context: Any) -> Any:
        return messages()["ServerLiveResponse"](live=True)

    def _ServerReady(self, request: Any, context: Any) -> Any:
        return messages()["ServerReadyResponse"](ready=self.service.ready)

    def _ServerMetadata(self, request: Any, context: Any) -> Any:
        return messages()["ServerMetadataResponse"](**server_metadata())

    def _ModelReady(self, request: Any, context: Any) -> Any:
        try:
            self.service.repository.find(request.name, request.version)
        except UnknownModelError:
            return messages()["ModelReadyResponse"](ready=False)
        return messages()["ModelReadyResponse"](ready=True)

    def _ModelMetadata(self, request: Any, context: Any) -> Any:
        repository, name = self.service.repository, request.name
        model = repository.find(name, request.version).model
        versions = [request.version] if request.version else repository.versions(name)
        described = protocol.model_metadata(name, versions, model.platform, model.signature)
        return messages()["ModelMetadataResponse"](**described)

    def _ModelInfer(self, request: Any, context: Any) -> Any:
        service, name = self.service, request.model_name
        metadata = dict(context.invocation_metadata())
        version = request.model_version or metadata.get("x-model-version")
        with (
            service.answering(name, version, "grpc") as answering,
            service.repository.lease(name, version, metadata.get("x-request-key")) as deployed,
        ):
            answering.deployed, served = deployed, deployed.model
            with answering.stage("decode"):
                inputs = read_tensors(request.inputs, request.raw_input_contents)
                for each in request.outputs:
                    protocol.refuse_output_parameters(each.name, each.parameters)
                asked = protocol.InferRequest(
                    inputs,
                    [protocol.RequestedOutput(each.name, True) for each in request.outputs],
                    id=request.id,
                    timeout=protocol.timeout_of(parameters_of(request)),
                )
                wanted = asked.wanted(served.signature)
                most = service.limits.max_rows
                arrays = protocol.strict_inputs(served.signature, inputs, most)
            answering.mirror(arrays)
            deadline = context.time_remaining()
            times = [each for each in (asked.timeout, deadline) if each is not None]
            results = served.call(arrays, service.seconds_of(min(times, default=None)))
            with answering.stage("encode"):
                answer = messages()["ModelInferResponse"](
                    model_name=name, model_version=deployed.version, id=request.id
                )
                for position, output in wanted:
                    array = results[position]
                    describe_tensor(answer.outputs.add(), output.name, array)
                    answer.raw_output_contents.append(protocol.to_bytes(array))
                return answer

    def _RepositoryIndex(self, request: Any, context: Any) -> Any:
        entries = self.service.repository.index()
        models = [e for e in entries if not request.ready or e["state"] == "READY"]
        return messages()["RepositoryIndexResponse"](models=models)

    def _RepositoryModelLoad(self, request: Any, context: Any) -> Any:
        self.service.change("load", request.model_name)
        return messages()["RepositoryModelLoadResponse"]()

    def _RepositoryModelUnload(self, request: Any, context: Any) -> Any:
        self.service.change("unload", request.model_name)
        return messages()["RepositoryModelUnloadResponse"]()


class GrpcServer:
    """A server for gRPC; its threads wait for the model, so it needs as many as clients at a time.

    Parameters
    ----------
    service : InferenceService
    host : str
    port : int
        0 means any that is free.
    threads : int
        Requests that are answered at the same time.
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
            check_access=service.check_access,
            open_methods=OPEN_METHODS,
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
