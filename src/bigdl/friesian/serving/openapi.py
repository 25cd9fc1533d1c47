"""The HTTP interface of a recommender as OpenAPI."""

from __future__ import annotations

from functools import cache
from typing import Any

__all__ = ["openapi"]

_ID = {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 63) - 1}
_COUNT = {"type": "integer", "minimum": 1}
_SCHEMAS: dict[str, Any] = {
    "Error": {
        "type": "object",
        "properties": {"error": {"type": "string"}},
        "required": ["error"],
    },
    "RecommendRequest": {
        "type": "object",
        "properties": {
            "users": {"type": "array", "items": _ID},
            "k": {**_COUNT, "default": 10, "description": "items of an answer"},
            "candidates": {**_COUNT, "description": "items that are ranked; at least k"},
            "deadline_ms": {"type": "number", "exclusiveMinimum": 0},
        },
        "required": ["users"],
        "additionalProperties": False,
    },
    "Recommendation": {
        "type": "object",
        "properties": {
            "user": _ID,
            "items": {"type": "array", "items": _ID},
            "scores": {"type": "array", "items": {"type": "number"}},
            "source": {"type": "string", "enum": ["ranked", "recalled", "popular"]},
            "reason": {"type": "string", "description": "why the ranker did not answer"},
        },
        "required": ["user", "items", "scores", "source"],
    },
    "Recommendations": {
        "type": "object",
        "properties": {
            "recommendations": {
                "type": "array",
                "items": {"$ref": "#/components/schemas/Recommendation"},
            }
        },
        "required": ["recommendations"],
    },
    "Object": {"type": "object"},
}
_ERRORS = {
    400: "the request is wrong",
    401: "the token is missing or wrong",
    405: "the method is another one",
    408: "the body did not come in time",
    413: "the request is too large",
    429: "too many requests at the same time",
    503: "the server cannot answer now",
}


def _of_json(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}


def _operation(
    summary: str, content: dict[str, Any], *errors: int, is_open: bool = False, **more: Any
) -> dict[str, Any]:
    responses = {"200": {"description": "the answer", "content": content}}
    for status in sorted({405, *errors} | (set() if is_open else {401})):
        responses[str(status)] = {"description": _ERRORS[status], "content": _of_json("Error")}
    return {
        "summary": summary,
        "responses": responses,
        "security": [] if is_open else [{}, {"token": []}],
        **more,
    }


def _in(place: str, name: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "schema": schema, "required": place == "path"}


@cache
def openapi() -> dict[str, Any]:
    """Return the description of the interface (OpenAPI 3.1)."""
    best = "The best items of users."
    health = {"is_open": True}
    ready = _operation("Requests may come.", _of_json("Object"), 503, **health)
    ready["responses"]["503"]["content"] = _of_json("Object")
    return {
        "openapi": "3.1.0",
        "info": {"title": "BigDL recommender", "version": "1"},
        "paths": {
            "/recommend": {
                "post": _operation(
                    best,
                    _of_json("Recommendations"),
                    *(400, 408, 413, 429, 503),
                    requestBody={"content": _of_json("RecommendRequest"), "required": True},
                )
            },
            "/recommend/{user}": {
                "get": _operation(
                    "The best items of one user, as in BigDL 2.x.",
                    _of_json("Recommendations"),
                    *(400, 429, 503),
                    parameters=[
                        _in("path", "user", _ID),
                        _in("query", "k", _COUNT),
                        _in("query", "canK", _COUNT),
                    ],
                )
            },
            "/v2/health/live": {
                "get": _operation("The server lives.", _of_json("Object"), **health)
            },
            "/v2/health/ready": {"get": ready},
            "/metrics": {
                "get": _operation(
                    "Metrics in the format of Prometheus.",
                    {"text/plain": {"schema": {"type": "string"}}},
                )
            },
            "/openapi.json": {"get": _operation("This description.", _of_json("Object"))},
        },
        "components": {
            "schemas": _SCHEMAS,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }
