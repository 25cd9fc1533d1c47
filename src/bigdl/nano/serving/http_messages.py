"""Messages of HTTP: requests whose body has arrived, and responses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from bigdl.common.errors import LazyModule
from bigdl.nano.serving.open_inference import parse_json

orjson = LazyModule("orjson", "serving")
Receive = Callable[[], Awaitable[dict[str, Any]]]
JSON = "application/json"


class BodyParts(Protocol):
    """Parts of a body that is sent while it is computed."""

    def __aiter__(self) -> Self: ...
    async def __anext__(self) -> bytes: ...
    async def aclose(self) -> None: ...


@dataclass(frozen=True)
class HttpRequest:
    """An HTTP request whose body has arrived.

    Attributes
    ----------
    method, path : str
    headers : dict of str to str
        Headers by lower-case name.
    body : bytes
    query : str
        Query string, without the question mark.
    receive : callable, optional
        ASGI's ``receive``; see :meth:`wait_until_gone`.

    Examples
    --------
    >>> from bigdl.nano.serving import HttpRequest
    >>> HttpRequest("POST", "/recommend", {}, b'{"user": 7}').json()
    {'user': 7}
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    query: str = ""
    receive: Receive | None = field(default=None, repr=False, compare=False)

    def json(self) -> dict[str, Any]:
        """Parse the body as a JSON object; an empty body is an empty object."""
        return parse_json(self.body) if self.body.strip() else {}

    async def wait_until_gone(self) -> None:
        """Wait until the client closes its connection or has received its response."""
        while self.receive is not None:
            if (await self.receive())["type"] == "http.disconnect":
                return
        await asyncio.Event().wait()


@dataclass(frozen=True)
class HttpAnswer:
    """An HTTP response.

    Attributes
    ----------
    body : bytes
    status : int
    content_type : str
    headers : dict of str to str
        Further headers.
    parts : async iterator of bytes, optional
        Parts of a body that is sent while it is computed, instead of `body`. Its ``aclose`` is
        called at the end, also if the client has left.

    Examples
    --------
    A route in addition to those of the protocol:

    >>> from bigdl.nano.serving import HttpAnswer, ModelRepository, ModelServer
    >>> async def hello(request, name):
    ...     return HttpAnswer(f"hello {name}".encode(), content_type="text/plain")
    >>> routes = {("GET", "/hello/{name}"): hello}
    >>> with ModelServer(ModelRepository(), http_port=0, grpc_port=None, routes=routes) as server:
    ...     from urllib.request import urlopen
    ...     urlopen(f"http://127.0.0.1:{server.http_port}/hello/you").read()
    b'hello you'
    """

    body: bytes = b""
    status: int = 200
    content_type: str = JSON
    headers: dict[str, str] = field(default_factory=dict)
    parts: BodyParts | None = None


def json_answer(content: object, status: int = 200) -> HttpAnswer:
    """Return a response with `content` as JSON."""
    return HttpAnswer(orjson.dumps(content), status)


Handler = Callable[..., Awaitable[HttpAnswer]]
