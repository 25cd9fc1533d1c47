"""OpenAPI description of a model server's HTTP interface, and an HTML page about it."""

from __future__ import annotations

import functools
import html
from collections.abc import Mapping
from typing import Any

__all__ = ["openapi", "page"]

_DATATYPES = (
    *("BOOL", "UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64"),
    *("FP16", "FP32", "FP64", "BYTES"),
)


def _object(required: list[str] | None = None, **properties: object) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    return {**schema, "required": required} if required else schema


_TEXT = {"type": "string"}
_TEXTS = {"type": "array", "items": _TEXT}
_SHAPE = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": 32}
_PARAMETERS = {"type": "object", "additionalProperties": True}
_DATATYPE = {"type": "string", "enum": list(_DATATYPES)}


def _reference(name: str) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{name}"}


def _list_of(name: str) -> dict[str, Any]:
    return {"type": "array", "items": _reference(name)}


_SCHEMAS = {
    "Error": _object(["error"], error=_TEXT),
    "ServerMetadata": _object(
        ["name", "version", "extensions"], name=_TEXT, version=_TEXT, extensions=_TEXTS
    ),
    "TensorMetadata": _object(
        ["name", "datatype", "shape"],
        name=_TEXT,
        datatype=_DATATYPE,
        shape={"type": "array", "items": {"type": "integer", "minimum": -1}},
    ),
    "ModelMetadata": _object(
        ["name", "versions", "platform", "inputs", "outputs"],
        name=_TEXT,
        versions=_TEXTS,
        platform=_TEXT,
        inputs=_list_of("TensorMetadata"),
        outputs=_list_of("TensorMetadata"),
    ),
    "InputTensor": _object(
        ["name", "datatype", "shape"],
        name=_TEXT,
        datatype=_DATATYPE,
        shape=_SHAPE,
        parameters=_PARAMETERS,
        data={"type": "array", "items": {}},
    ),
    "RequestedOutput": _object(["name"], name=_TEXT, parameters=_PARAMETERS),
    "InferRequest": _object(
        ["inputs"],
        id=_TEXT,
        parameters={
            **_PARAMETERS,
            "properties": {
                "timeout": {
                    "type": "number",
                    "exclusiveMinimum": 0,
                    "description": "Timeout of the request in microseconds.",
                },
                "binary_data_output": {"type": "boolean"},
            },
        },
        inputs=_list_of("InputTensor"),
        outputs=_list_of("RequestedOutput"),
    ),
    "OutputTensor": _object(
        ["name", "datatype", "shape"],
        name=_TEXT,
        datatype=_DATATYPE,
        shape=_SHAPE,
        parameters=_PARAMETERS,
        data={"type": "array", "items": {}},
    ),
    "InferResponse": _object(
        ["model_name", "model_version", "outputs"],
        model_name=_TEXT,
        model_version=_TEXT,
        id=_TEXT,
        outputs=_list_of("OutputTensor"),
    ),
    "ModelState": _object(
        ["name", "version", "state"], name=_TEXT, version=_TEXT, state=_TEXT, reason=_TEXT
    ),
    "Traffic": _object(
        shares={"type": "object", "additionalProperties": {"type": "number", "minimum": 0}},
        shadow={"type": "string"},
    ),
}
_COUNT = {"type": "integer", "minimum": 1}
_TEXT_OR_TEXTS = {"oneOf": [_TEXT, _TEXTS]}
_GENERATION = {
    "model": _TEXT,
    "max_tokens": _COUNT,
    "n": {**_COUNT, "maximum": 16, "default": 1},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2, "default": 1},
    "top_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 1},
    "frequency_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "presence_penalty": {"type": "number", "minimum": -2, "maximum": 2},
    "top_k": _COUNT,
    "seed": {"type": "integer"},
    "stop": {"oneOf": [_TEXT, {**_TEXTS, "maxItems": 16}]},
    "stream": {"type": "boolean", "default": False},
    "stream_options": _object(include_usage={"type": "boolean"}),
    "response_format": _object(["type"], type=_TEXT, json_schema={"type": "object"}),
}
_USAGE = _object(
    prompt_tokens={"type": "integer"},
    completion_tokens={"type": "integer"},
    total_tokens={"type": "integer"},
)
_CHOICES = {"type": "array", "items": {"type": "object"}}
_GENERATED = _object(
    ["id", "object", "model", "choices"],
    id=_TEXT,
    object=_TEXT,
    created={"type": "integer"},
    model=_TEXT,
    choices=_CHOICES,
    usage=_USAGE,
)
_OPENAI_SCHEMAS = {
    "OpenAIError": _object(
        ["error"], error=_object(["message", "type"], message=_TEXT, type=_TEXT)
    ),
    "OpenAIModel": _object(["id", "object"], id=_TEXT, object=_TEXT, created={"type": "integer"}),
    "OpenAIModels": _object(["data"], object=_TEXT, data=_list_of("OpenAIModel")),
    "ChatRequest": _object(
        ["model", "messages"],
        **_GENERATION,
        messages={
            "type": "array",
            "minItems": 1,
            "items": _object(
                ["role", "content"],
                role={"type": "string", "enum": ["system", "developer", "user", "assistant"]},
                content={"oneOf": [_TEXT, {"type": "array", "items": {"type": "object"}}]},
            ),
        },
        max_completion_tokens=_COUNT,
        logprobs={"type": "boolean", "default": False},
    ),
    "CompletionRequest": _object(
        ["model", "prompt"],
        **_GENERATION,
        prompt={"oneOf": [_TEXT, {**_TEXTS, "minItems": 1, "maxItems": 1}]},
        logprobs={"type": "integer", "minimum": 0, "maximum": 1},
    ),
    "Generated": _GENERATED,
    "EmbeddingsRequest": _object(
        ["model", "input"],
        model=_TEXT,
        input=_TEXT_OR_TEXTS,
        encoding_format={"type": "string", "enum": ["float", "base64"], "default": "float"},
        dimensions=_COUNT,
    ),
    "Embeddings": _object(["data"], object=_TEXT, data=_CHOICES, model=_TEXT, usage=_USAGE),
    "RerankRequest": _object(
        ["model", "query", "documents"],
        model=_TEXT,
        query=_TEXT,
        documents={
            "type": "array",
            "minItems": 1,
            "items": {"oneOf": [_TEXT, _object(["text"], text=_TEXT)]},
        },
        top_n=_COUNT,
        return_documents={"type": "boolean", "default": False},
    ),
    "Ranks": _object(["results"], id=_TEXT, model=_TEXT, results=_CHOICES, usage=_USAGE),
}
_MEANINGS = {
    400: "The request is invalid; the error text says why.",
    401: "The token is missing or wrong.",
    403: "The server does not allow that.",
    404: "There is no such model or version.",
    408: "The body did not arrive in time.",
    413: "The request is too large.",
    415: "The encoding of the body is not supported.",
    503: "Not ready, or too many requests wait; try again later.",
    504: "The request exceeded its timeout.",
}


def _operation(
    path: str,
    summary: str,
    answer: str | None = None,
    *,
    request: str | None = None,
    errors: tuple[int, ...] = (),
    headers: dict[str, str] | None = None,
    media: str = "application/json",
    answers_list: bool = False,
    optional: bool = False,
) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 1, "pattern": "^[^/]+$"},
        }
        for name in ("model", "version")
        if f"{{{name}}}" in path
    ]
    for name, description in (headers or {}).items():
        parameters.append(
            {"name": name, "in": "header", "description": description, "schema": _TEXT}
        )
    ok: dict[str, Any] = {"description": "Done."}
    if answer is not None:
        schema = {"type": "string"} if media != "application/json" else _reference(answer)
        if answers_list:
            schema = _list_of(answer)
        ok["content"] = {media: {"schema": schema}}
        if answer == "Generated":
            ok["content"]["text/event-stream"] = {"schema": _TEXT}
        if answer == "InferResponse":
            binary = {"schema": {"type": "string", "format": "binary"}}
            ok["content"]["application/octet-stream"] = binary
    responses: dict[str, Any] = {"200": ok}
    health = path.startswith("/v2/health")
    for status in sorted({*errors, *(() if health else (401, 403))}):
        responses[str(status)] = {"description": _MEANINGS[status]}
        if path != "/v2/health/ready":
            error = "OpenAIError" if path.startswith("/v1/") else "Error"
            content = {"application/json": {"schema": _reference(error)}}
            responses[str(status)]["content"] = content
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if parameters:
        operation["parameters"] = parameters
    if request is not None:
        operation["requestBody"] = {
            "required": not optional,
            "content": {"application/json": {"schema": _reference(request)}},
        }
    if not health:
        operation["security"] = [{}, {"token": []}]
    return operation


_OPENAI_REQUESTS = (
    ("/v1/chat/completions", "Answer a chat.", "ChatRequest", "Generated"),
    ("/v1/completions", "Continue a text.", "CompletionRequest", "Generated"),
    ("/v1/embeddings", "Embed texts.", "EmbeddingsRequest", "Embeddings"),
    ("/v1/rerank", "Order documents by their relevance for a query.", "RerankRequest", "Ranks"),
)
_MODEL = "/v2/models/{model}"
_VERSION = f"{_MODEL}/versions/{{version}}"
_REPOSITORY = "/v2/repository/models/{model}"
_CHOICE = {
    "X-Request-Key": "With traffic split among versions, requests with one key get one version.",
    "X-Model-Version": "Version of the model to use.",
}


@functools.lru_cache(8)
def openapi(models: tuple[str, ...] = ()) -> dict[str, Any]:
    """Return the OpenAPI 3.1 description of the interface, with the names of the models."""
    infer = "Compute a model's outputs."
    wrong = (400, 404, 408, 413, 415, 503, 504)
    changes = (400, 403, 404, 408, 413, 415)
    listed: list[tuple[str, str, dict[str, Any]]] = []

    def add(method: str, path: str, summary: str, *arguments: Any, **more: Any) -> None:
        listed.append((method, path, _operation(path, summary, *arguments, **more)))

    add("get", "/v2/health/live", "The server is live.")
    add("get", "/v2/health/ready", "The server is ready.", errors=(503,))
    add("get", "/v2", "Name, version and extensions of the server.", "ServerMetadata")
    for path in (_MODEL, _VERSION):
        metadata = "Inputs, outputs and versions of a model."
        add("get", path, metadata, "ModelMetadata", errors=(404,))
        add("get", f"{path}/ready", "The model is ready.", errors=(404,))
        headers = _CHOICE if path == _MODEL else None
        more = {"request": "InferRequest", "errors": wrong, "headers": headers}
        add("post", f"{path}/infer", infer, "InferResponse", **more)
    body = (400, 408, 413, 415)
    index = "All models and their states."
    add("post", "/v2/repository/index", index, "ModelState", answers_list=True, errors=body)
    add("post", f"{_REPOSITORY}/load", "Load or reload a model.", errors=changes)
    add("post", f"{_REPOSITORY}/unload", "Unload a model.", errors=changes)
    add(
        "post",
        f"{_REPOSITORY}/traffic",
        "Split the requests of a model among its versions.",
        request="Traffic",
        optional=True,
        errors=changes,
    )
    add("get", "/v1/models", "The text models.", "OpenAIModels")
    add("get", "/v1/models/{model}", "A text model.", "OpenAIModel", errors=(400, 404))
    for path, summary, asked, answer in _OPENAI_REQUESTS:
        add("post", path, summary, answer, request=asked, errors=wrong)
    add("get", "/metrics", "Metrics in the Prometheus format.", "Metrics", media="text/plain")
    add("get", "/openapi.json", "This description.", "Description")
    paths: dict[str, Any] = {}
    for method, path, operation in listed:
        for parameter in operation.get("parameters", []):
            if models and parameter["name"] == "model":
                parameter["schema"] = {"type": "string", "enum": list(models)}
        paths.setdefault(path, {})[method] = operation
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "BigDL model server",
            "version": "2",
            "description": "The Open Inference Protocol, and the OpenAI protocol for text models "
            "(paths that begin with /v1). Instead of data in JSON, binary tensors "
            "may follow the JSON, whose length is in the header Inference-Header-Content-Length.",
        },
        "paths": paths,
        "components": {
            "schemas": {**_SCHEMAS, **_OPENAI_SCHEMAS, "Description": {"type": "object"}},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def page(further: Mapping[str, Any]) -> str:
    """Return an HTML page that lists the interface and loads no external resources.

    Parameters
    ----------
    further : dict
        OpenAPI paths in addition to those of the protocol.
    """
    rows = []
    for path, methods in {**openapi()["paths"], **further}.items():
        for method, operation in methods.items():
            answers = ", ".join(
                f"{status} {html.escape(each['description'])}"
                for status, each in operation["responses"].items()
            )
            rows.append(
                f"<tr><td>{method.upper()}<td><code>{html.escape(path)}</code>"
                f"<td>{html.escape(operation['summary'])}<td>{answers}"
            )
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>BigDL model server</title>"
        "<style>body{font:16px sans-serif;margin:2em}td,th{padding:.3em .8em;text-align:left;"
        "vertical-align:top;border-bottom:1px solid #ddd}</style><h1>BigDL model server</h1>"
        "<p>The Open Inference Protocol; machine-readable: "
        "<a href='openapi.json'>openapi.json</a>.</p><table><tr><th>Method<th>Path<th>Summary"
        f"<th>Responses</tr>{''.join(rows)}</table></html>"
    )
