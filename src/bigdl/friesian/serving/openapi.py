"""OpenAPI description of a recommender's HTTP routes, except the routes of its models."""

from __future__ import annotations

from typing import Any

__all__ = ["PATHS"]

_ID = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
_COUNT = {"type": "integer", "minimum": 1}
_REQUEST = {
    "type": "object",
    "properties": {
        "users": {"type": "array", "items": _ID},
        "k": {**_COUNT, "default": 10, "description": "maximum number of items per user"},
        "candidates": {**_COUNT, "description": "number of items to rank per user; at least k"},
        "deadline_ms": {"type": "number", "exclusiveMinimum": 0},
        "filter": {
            "type": "object",
            "properties": {
                "allow": {"type": "array", "items": _ID},
                "deny": {"type": "array", "items": _ID},
                "where": {
                    "type": "object",
                    "description": "per attribute of items: a value, a list of values, or an "
                    "object with min and max",
                },
            },
            "additionalProperties": False,
        },
    },
    "required": ["users"],
    "additionalProperties": False,
}
_RECOMMENDATION = {
    "type": "object",
    "properties": {
        "user": _ID,
        "items": {"type": "array", "items": _ID},
        "scores": {"type": "array", "items": {"type": "number"}},
        "source": {"type": "string", "enum": ["ranked", "recalled", "popular"]},
        "partial": {"type": "boolean", "description": "true if items of a lost shard are missing"},
        "reason": {"type": "string", "description": "why the items are not ranked"},
    },
    "required": ["user", "items", "scores", "source"],
}
_ANSWER = {
    "type": "object",
    "properties": {"recommendations": {"type": "array", "items": _RECOMMENDATION}},
    "required": ["recommendations"],
}
_EVENTS = {
    "type": "object",
    "properties": {
        "events": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "user": _ID,
                    "item": _ID,
                    "time": {"type": "number", "description": "seconds since 1970; default: now"},
                    "id": {
                        "type": ["string", "integer"],
                        "description": "an event is appended once per id",
                    },
                },
                "required": ["user", "item"],
                "additionalProperties": False,
            },
        }
    },
    "required": ["events"],
    "additionalProperties": False,
}
_APPENDED = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("added", "repeated", "late")},
    "required": ["added", "repeated", "late"],
}
_ERROR = {
    "type": "object",
    "properties": {"error": {"type": "string"}},
    "required": ["error"],
}
_MEANINGS = {
    400: "The request is invalid.",
    401: "The token is missing or invalid.",
    403: "The token does not permit this.",
    404: "The path does not exist.",
    405: "The path does not support the method.",
    408: "The body did not arrive in time.",
    413: "The request is too large.",
    415: "The compression of the body is not supported.",
    503: "Too many concurrent requests, or the server is shutting down.",
}


def _of_json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _operation(
    summary: str,
    *errors: int,
    answer: tuple[str, dict[str, Any]] = ("The recommended items of each user.", _ANSWER),
    **more: object,
) -> dict[str, Any]:
    text, schema = answer
    responses = {"200": {"description": text, "content": _of_json(schema)}}
    for status in sorted((400, 401, 403, 404, 405, 503, *errors)):
        content = _of_json(_ERROR)
        responses[str(status)] = {"description": _MEANINGS[status], "content": content}
    return {"summary": summary, "responses": responses, **more}


def _in(location: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": location, "schema": schema, "required": location == "path"}


PATHS: dict[str, Any] = {
    "/recommend": {
        "post": _operation(
            "Recommend items to some users.",
            *(408, 413, 415),
            requestBody={"content": _of_json(_REQUEST), "required": True},
        )
    },
    "/events": {
        "post": _operation(
            "Append events to the histories of users.",
            *(408, 413, 415),
            answer=("Number of events by result.", _APPENDED),
            requestBody={"content": _of_json(_EVENTS), "required": True},
        )
    },
    "/recommend/{user}": {
        "get": _operation(
            "Recommend items to one user, as in BigDL 2.x.",
            parameters=[
                _in("path", "user", _ID),
                _in("query", "k", _COUNT),
                _in("query", "canK", _COUNT),
            ],
        )
    },
}
"""OpenAPI 3.1 paths and their operations."""
