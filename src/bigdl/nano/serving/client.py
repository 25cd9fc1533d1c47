"""Client of model servers that speak the Open Inference Protocol over HTTP or gRPC."""

from __future__ import annotations

import http.client
import json
import ssl
import threading
import urllib.parse
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import SplitResult

import numpy as np

from bigdl.common.checks import check_number
from bigdl.common.errors import BigDLError, UsageError
from bigdl.nano.serving.grpc_client import GrpcClient
from bigdl.nano.serving.messages import (
    SERVICE,
    describe_tensor,
    messages,
    read_tensors,
    set_parameter,
)
from bigdl.nano.serving.open_inference import from_bytes, from_values, json_values, to_bytes
from bigdl.nano.serving.protos import MessageClass
from bigdl.nano.serving.signature import Signature, TensorSpec, datatype_of, dtype_of

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

__all__ = ["Client", "ServerError"]

_SCHEMES = ("http", "https", "grpc", "grpcs")


class ServerError(BigDLError, RuntimeError):
    """Exception raised when a server refuses a request or cannot be reached.

    Attributes
    ----------
    status : int or str
        HTTP status, or name of the gRPC status code; 0 if the server did not answer.

    Examples
    --------
    >>> from bigdl.nano.serving import Client, ServerError
    >>> try:
    ...     Client("http://127.0.0.1:1").is_ready(strict=True)
    ... except ServerError as error:
    ...     print(error.status)
    0
    """

    code = "cluster-refused"

    def __init__(self, sentence: str, status: int | str):
        super().__init__(sentence)
        self.status = status


class Client:
    """Client of one model server; any number of threads may use it.

    Parameters
    ----------
    url : str
        ``http://host:port``, ``https://…``, ``grpc://host:port`` or ``grpcs://…`` (with TLS).
    token : str, optional
        Bearer token sent with every request.
    timeout : float
        Default timeout of a request in seconds.
    ca : str, optional
        PEM file of trusted certificates. Default: the system's certificates.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.nano.serving import Client, ModelRepository, ModelServer, ServedModel
    >>> repository = ModelRepository()
    >>> model = ServedModel(torch.nn.Linear(2, 1), sample=torch.ones(1, 2))
    >>> deployed = repository.add("line", model)
    >>> server = ModelServer(repository, http_port=None, grpc_port=0)
    >>> with server, Client(f"grpc://127.0.0.1:{server.grpc_port}") as client:
    ...     print(client.metadata("line")["inputs"])
    ...     client.infer("line", {"input": np.ones((3, 2), "float32")}).shape
    [{'name': 'input', 'datatype': 'FP32', 'shape': [-1, 2]}]
    (3, 1)
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        timeout: float = 60.0,
        ca: str | None = None,
    ):
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in _SCHEMES or not parts.hostname:
            raise UsageError(
                f"The URL of a server begins with http://, https://, grpc:// or grpcs://, got "
                f"{url!r}",
                code="argument-value",
                argument="url",
            )
        check_number("timeout", timeout, above=0)
        self.url, self.timeout = url, timeout
        make = _Http if parts.scheme.startswith("http") else _Grpc
        self._transport: _Http | _Grpc = make(parts, token, timeout, ca)
        self._signatures: dict[tuple[str, str], Signature] = {}

    def is_live(self) -> bool:
        """Return True if the server is live."""
        return self._health("live")

    def is_ready(
        self, model: str | None = None, version: str = "", *, strict: bool = False
    ) -> bool:
        """Return True if the server, or one of its models, is ready to answer requests.

        Parameters
        ----------
        model, version : str, optional
        strict : bool
            Raise a :class:`ServerError` instead of returning False.
        """
        return self._health("ready", model, version, strict=strict)

    def _health(self, *arguments: Any, strict: bool = False) -> bool:
        try:
            return self._transport.health(*arguments)
        except ServerError:
            if strict:
                raise
            return False

    def metadata(self, model: str | None = None, version: str = "") -> dict[str, Any]:
        """Return the metadata of the server, or the inputs, outputs and versions of a model."""
        return self._transport.metadata(model, version)

    def signature(self, model: str, version: str = "") -> Signature:
        """Return the names, types and shapes of a model's inputs and outputs."""
        described = self.metadata(model, version)

        def specs(key: str) -> tuple[TensorSpec, ...]:
            return tuple(
                TensorSpec(each["name"], dtype_of(each["datatype"]), tuple(each["shape"]))
                for each in described[key]
            )

        return Signature(specs("inputs"), specs("outputs"))

    def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike] | ArrayLike,
        *,
        version: str = "",
        outputs: Iterable[str] | None = None,
        timeout: float | None = None,
        key: str | None = None,
        binary: bool = True,
        id: str = "",
    ) -> np.ndarray | dict[str, np.ndarray]:
        """Send inputs to a model and return its outputs.

        Parameters
        ----------
        model : str
        inputs : dict of str to array_like, or array_like
            All inputs by name, or an array if the model has one input. Arrays are not converted,
            so they must have the model's types.
        version : str, optional
        outputs : iterable of str, optional
            Names of the outputs to return. Default: all.
        timeout : float, optional
            Timeout of the request in seconds. Default: the client's.
        key : str, optional
            With traffic split among versions, requests of one key get the same version.
        binary : bool
            False sends and receives numbers as JSON over HTTP.
        id : str, optional
            Request id that the server returns with the response.

        Returns
        -------
        ndarray or dict of str to ndarray
            A dict if there are several outputs.

        Raises
        ------
        ServerError
            If the server refuses the request or cannot be reached.
        """
        if not isinstance(inputs, Mapping):
            name = self._only_input(model, version)
            inputs = {name: inputs}
        arrays = {name: _array(value) for name, value in inputs.items()}
        if timeout is not None:
            check_number("timeout", timeout, above=0)
        wanted = list(outputs or ())
        results = self._transport.infer(model, version, arrays, wanted, timeout, key, binary, id)
        return next(iter(results.values())) if len(results) == 1 else results

    def _only_input(self, model: str, version: str) -> str:
        known = self._signatures.get((model, version))
        if known is None:
            known = self._signatures[model, version] = self.signature(model, version)
        if len(known.inputs) != 1:
            names = ", ".join(spec.name for spec in known.inputs)
            raise UsageError(
                f"Model {model!r} takes the inputs {names}; pass a dict of them",
                code="model-input",
            )
        return known.inputs[0].name

    def models(self) -> list[dict[str, str]]:
        """Return the name, version and state of every model, and the reason for a failure."""
        return self._transport.models()

    def load(self, model: str) -> None:
        """Load a model on the server, or reload it."""
        self._transport.change("load", model)

    def unload(self, model: str) -> None:
        """Unload a model from the server."""
        self._transport.change("unload", model)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _array(value: ArrayLike) -> np.ndarray:
    array = np.asarray(value)
    return array.astype(object) if array.dtype.kind in "SU" else array


class _Http:
    """HTTP transport with one connection per thread."""

    def __init__(self, parts: SplitResult, token: str | None, timeout: float, ca: str | None):
        self._host, self._port, self._path = (
            parts.hostname or "",
            parts.port,
            parts.path.rstrip("/"),
        )
        self._timeout = timeout
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._tls = ssl.create_default_context(cafile=ca) if parts.scheme == "https" else None
        self._local = threading.local()
        self._lock = threading.Lock()
        self._open: list[http.client.HTTPConnection] = []

    def _connection(self) -> http.client.HTTPConnection:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            if self._tls is not None:
                connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=self._timeout, context=self._tls
                )
            else:
                connection = http.client.HTTPConnection(
                    self._host, self._port, timeout=self._timeout
                )
            self._local.connection = connection
            with self._lock:
                self._open.append(connection)
        return connection

    def _request(
        self,
        method: str,
        path: str,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> tuple[bytes, http.client.HTTPResponse]:
        connection = self._connection()
        used = connection.sock is not None
        sent = {**self._headers, **(headers or {})}
        try:
            connection.timeout = timeout or self._timeout
            if connection.sock is not None:
                connection.sock.settimeout(connection.timeout)
            connection.request(method, self._path + path, body or None, sent)
            response = connection.getresponse()
            content = response.read()
        except (http.client.HTTPException, OSError) as error:
            connection.close()
            gone = http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError
            if used and isinstance(error, gone):  # the server closed an idle connection: retry
                return self._request(method, path, body, headers, timeout)
            raise ServerError(
                f"The server at {self._host}:{self._port} does not answer: {error}", 0
            ) from error
        if response.status >= 400:
            raise ServerError(_sentence(content, response.status), response.status)
        return content, response

    def health(self, state: str, model: str | None = None, version: str = "") -> bool:
        path = f"/v2/health/{state}" if model is None else f"{_model(model, version)}/ready"
        self._request("GET", path)
        return True

    def metadata(self, model: str | None, version: str) -> dict[str, Any]:
        path = "/v2" if model is None else _model(model, version)
        return json.loads(self._request("GET", path)[0])

    def models(self) -> list[dict[str, str]]:
        return json.loads(self._request("POST", "/v2/repository/index")[0])

    def change(self, action: str, model: str) -> None:
        self._request("POST", f"/v2/repository/models/{_quoted(model)}/{action}")

    def infer(
        self,
        model: str,
        version: str,
        arrays: Mapping[str, np.ndarray],
        outputs: list[str],
        timeout: float | None,
        key: str | None,
        binary: bool,
        id: str,
    ) -> dict[str, np.ndarray]:
        tensors, parts = [], []
        for name, array in arrays.items():
            tensor: dict[str, Any] = {
                "name": name,
                "datatype": datatype_of(array.dtype),
                "shape": list(array.shape),
            }
            if binary:
                parts.append(to_bytes(array))
                tensor["parameters"] = {"binary_data_size": len(parts[-1])}
            else:
                tensor["data"] = _json_list(array, name)
            tensors.append(tensor)
        request: dict[str, Any] = {"inputs": tensors, "parameters": {"binary_data_output": binary}}
        if id:
            request["id"] = id
        if timeout is not None:
            request["parameters"]["timeout"] = max(int(timeout * 1e6), 1)
        if outputs:
            request["outputs"] = [
                {"name": name, "parameters": {"binary_data": binary}} for name in outputs
            ]
        head = json.dumps(request).encode()
        headers = {"Content-Type": "application/octet-stream" if parts else "application/json"}
        if parts:
            headers["Inference-Header-Content-Length"] = str(len(head))
        if key is not None:
            headers["X-Request-Key"] = key
        path = f"{_model(model, version)}/infer"
        # Leave the server a second to answer that the timeout is exceeded.
        wait = None if timeout is None else timeout + 1
        content, response = self._request("POST", path, b"".join([head, *parts]), headers, wait)
        length = response.getheader("Inference-Header-Content-Length")
        return _outputs_of(content, len(content) if length is None else int(length))

    def close(self) -> None:
        with self._lock:
            for connection in self._open:
                connection.close()
            self._open.clear()


def _json_list(array: np.ndarray, name: str) -> list:
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise UsageError(
            f"Input {name!r} holds numbers that are not finite, which JSON lacks; "
            "leave binary=True",
            code="data-value",
            argument=name,
        )
    return list(json_values(array, name)) if array.dtype.kind in "OSU" else array.ravel().tolist()


def _outputs_of(content: bytes, length: int) -> dict[str, np.ndarray]:
    answer, begin, results = json.loads(content[:length]), length, {}
    for output in answer["outputs"]:
        name, datatype, shape = output["name"], output["datatype"], output["shape"]
        size = (output.get("parameters") or {}).get("binary_data_size")
        if size is None:
            values = output["data"]
            if datatype.startswith("FP"):
                values = [float("nan") if value is None else value for value in values]
            results[name] = from_values(values, datatype, shape, name)
        else:
            data = content[begin : begin + size]
            # a writable copy for the caller
            results[name] = from_bytes(bytearray(data), datatype, shape, name)
            begin += size
    return results


def _quoted(name: str) -> str:
    return urllib.parse.quote(name, safe="")


def _model(model: str, version: str) -> str:
    path = f"/v2/models/{_quoted(model)}"
    return f"{path}/versions/{_quoted(version)}" if version else path


def _sentence(content: bytes, status: int) -> str:
    try:
        return str(json.loads(content)["error"])
    except (ValueError, KeyError, TypeError):
        return f"The server answered with status {status}"


class _Grpc(GrpcClient):
    """gRPC transport with one channel for all threads."""

    def __init__(self, parts: SplitResult, token: str | None, timeout: float, ca: str | None):
        if parts.port is None:
            raise UsageError(
                "The URL of a gRPC server needs a port",
                code="argument-value",
                argument="url",
            )
        super().__init__(
            parts.netloc.rpartition("@")[2],
            SERVICE,
            lambda name: messages()[f"{name}Response"],
            timeout=timeout,
            token=token,
            tls=parts.scheme == "grpcs",
            authority=None if ca is None else Path(ca).read_bytes(),
        )

    def _call(self, name: str, request: MessageClass, *arguments: Any) -> MessageClass:
        try:
            return self.call(name, request, *arguments)
        except self._rpc_error as error:
            raise ServerError(error.details() or "", error.code().name) from error

    def health(self, state: str, model: str | None = None, version: str = "") -> bool:
        made = messages()
        if model is not None:
            return self._call(
                "ModelReady", made["ModelReadyRequest"](name=model, version=version)
            ).ready
        name = f"Server{state.capitalize()}"
        return bool(getattr(self._call(name, made[f"{name}Request"]()), state))

    def metadata(self, model: str | None, version: str) -> dict[str, Any]:
        made = messages()
        if model is None:
            answer = self._call("ServerMetadata", made["ServerMetadataRequest"]())
            return {
                "name": answer.name,
                "version": answer.version,
                "extensions": list(answer.extensions),
            }
        request = made["ModelMetadataRequest"](name=model, version=version)
        answer = self._call("ModelMetadata", request)
        ends = {
            key: [
                {"name": each.name, "datatype": each.datatype, "shape": list(each.shape)}
                for each in getattr(answer, key)
            ]
            for key in ("inputs", "outputs")
        }
        versions = list(answer.versions)
        return {"name": answer.name, "versions": versions, "platform": answer.platform, **ends}

    def models(self) -> list[dict[str, str]]:
        answer = self._call("RepositoryIndex", messages()["RepositoryIndexRequest"]())
        keys = ("name", "version", "state", "reason")
        return [{key: getattr(each, key) for key in keys} for each in answer.models]

    def change(self, action: str, model: str) -> None:
        name = f"RepositoryModel{action.capitalize()}"
        self._call(name, messages()[f"{name}Request"](model_name=model))

    def infer(
        self,
        model: str,
        version: str,
        arrays: Mapping[str, np.ndarray],
        outputs: list[str],
        timeout: float | None,
        key: str | None,
        binary: bool,
        id: str,
    ) -> dict[str, np.ndarray]:
        request = messages()["ModelInferRequest"](model_name=model, model_version=version, id=id)
        for name, array in arrays.items():
            describe_tensor(request.inputs.add(), name, array)
            request.raw_input_contents.append(to_bytes(array))
        for name in outputs:
            request.outputs.add(name=name)
        if timeout is not None:
            set_parameter(request, "timeout", max(int(timeout * 1e6), 1))
        extra = () if key is None else (("x-request-key", key),)
        answer = self._call("ModelInfer", request, extra, timeout)
        results = read_tensors(answer.outputs, answer.raw_output_contents)
        return {name: array.copy() for name, array in results.items()}
