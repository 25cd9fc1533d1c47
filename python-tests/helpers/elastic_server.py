"""An HTTP server that answers the requests of Elasticsearch's client as Elasticsearch 9 does.

It speaks what `bigdl.orca.data.elastic_search` needs: mappings, counts, points in time with slices
and ``search_after``, bulk requests with the errors of single documents, users. What real servers do
and it does not: shards, analysis of texts, every query but ``match_all``, ``term`` and one
``field:value`` of a query string.
"""

import base64
import contextlib
import copy
import json
import threading
import uuid
from collections.abc import Iterator
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

_PYTHON = {"long": int, "integer": int, "double": float, "float": float, "boolean": bool}


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, kind: str, reason: str, **more):
        self.status = status
        cause = {"type": kind, "reason": reason, **more}
        self.body = {"error": {"root_cause": [cause], **cause}, "status": status}
        super().__init__(reason)


class ElasticServer:
    """Indices in memory, and the server that gives them away.

    Attributes
    ----------
    indices : dict of str to dict
        Of each index its ``"mappings"`` and ``"documents"``, sources by ids.
    users : dict of str to str
        Passwords; everybody may do everything while it is empty.
    requests : list of (method, path, body)
        What was asked.
    points : dict
        The open points in time: documents and the keep-alive.
    """

    def __init__(self):
        self.indices: dict[str, dict] = {}
        self.users: dict[str, str] = {}
        self.requests: list[tuple[str, str, object]] = []
        self.points: dict[str, tuple[list, str]] = {}
        self.is_broken = lambda method, path: None  # a Refusal, to answer with it
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"elastic": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.port = self._server.server_address[1]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def index(self, name: str, properties: dict | None = None, documents=()) -> None:
        self.indices[name] = {"mappings": {"properties": properties or {}}, "documents": {}}
        for number, source in enumerate(documents):
            self.indices[name]["documents"][str(number)] = source

    # -- what is asked -------------------------------------------------------------------------

    def answer(self, method: str, path: str, options: dict, text: str):
        parts = [unquote(part) for part in path.strip("/").split("/")]
        match (method, *parts):
            case ("HEAD", name):
                self._named(name)
                return None
            case ("GET", name, "_mapping"):
                return {
                    each: {"mappings": self.indices[each]["mappings"]} for each in self._named(name)
                }
            case ("POST" | "GET", name, "_count"):
                query = (json.loads(text) if text else {}).get("query")
                rows = [row for each in self._named(name) for row in self._rows(each)]
                return {"count": sum(_matches(row["_source"], query) for row in rows)}
            case ("POST", name, "_refresh"):
                return {"_shards": {"failed": 0}, "indices": self._named(name)}
            case ("POST", name, "_pit"):
                point = uuid.uuid4().hex
                rows = [row for each in self._named(name) for row in self._rows(each)]
                self.points[point] = (copy.deepcopy(rows), options["keep_alive"])
                return {"id": point}
            case ("DELETE", "_pit"):
                found = self.points.pop(json.loads(text)["id"], None)
                if found is None:
                    raise Refusal(404, "search_context_missing_exception", "No search context")
                return {"succeeded": True, "num_freed": 1}
            case ("POST", "_search"):
                return self._search(json.loads(text))
            case ("PUT" | "POST", "_bulk"):
                return self._bulk(text)
        raise Refusal(400, "illegal_argument_exception", f"no handler for {method} {path}")

    def _named(self, names: str) -> list[str]:
        found = []
        for name in names.split(","):
            matching = [each for each in self.indices if fnmatchcase(each, name)]
            if not matching and "*" not in name:
                reason = f"no such index [{name}]"
                raise Refusal(404, "index_not_found_exception", reason, **{"resource.id": name})
            found += matching
        return found

    def _rows(self, name: str) -> list[dict]:
        documents = self.indices[name]["documents"]
        return [
            {"_index": name, "_id": key, "_source": source} for key, source in documents.items()
        ]

    def _search(self, body: dict) -> dict:
        unknown = body.keys() - {
            "pit", "query", "size", "sort", "slice", "search_after", "_source", "track_total_hits"
        }  # fmt: skip
        if unknown or body["sort"] not in ("_shard_doc", ["_shard_doc"]):
            raise Refusal(400, "parsing_exception", f"unknown {unknown or body['sort']}")
        old = body["pit"]["id"]
        if old not in self.points:
            raise Refusal(
                404, "search_context_missing_exception", f"No search context for id [{old}]"
            )
        rows, _ = self.points[old]
        number, slices = body.get("slice", {"id": 0, "max": 1}).values()
        after = body.get("search_after", [-1])[0]
        hits = [
            {**row, "_score": None, "sort": [place]}
            for place, row in enumerate(rows)
            if place % slices == number and place > after
            if _matches(row["_source"], body.get("query"))
        ][: body["size"]]
        for hit in hits:
            hit["_source"] = _filtered(hit["_source"], **body.get("_source", {}))
        new = uuid.uuid4().hex  # a server may give another id for the same point in time
        self.points[new] = self.points[old]
        return {"pit_id": new, "timed_out": False, "hits": {"hits": hits}}

    def _bulk(self, text: str) -> dict:
        lines = iter([json.loads(line) for line in text.splitlines() if line])
        items = []
        for command in lines:
            ((operation, about),) = command.items()
            body = None if operation == "delete" else next(lines)
            key = about.get("_id") or uuid.uuid4().hex
            try:
                status, error = self._write(operation, about["_index"], key, body), {}
            except Refusal as refusal:
                status, error = refusal.status, {"error": refusal.body["error"]}
            items.append(
                {operation: {"_index": about["_index"], "_id": key, "status": status, **error}}
            )
        return {
            "errors": any("error" in each for item in items for each in item.values()),
            "items": items,
        }

    def _write(self, operation: str, name: str, key: str, body: dict | None) -> int:
        if name not in self.indices:
            self.index(name)
        documents = self.indices[name]["documents"]
        if operation == "delete":
            return 404 if documents.pop(key, None) is None else 200
        if operation == "create" and key in documents:
            reason = f"[{key}]: version conflict, document already exists (current version [1])"
            raise Refusal(409, "version_conflict_engine_exception", reason)
        if operation == "update":
            if key not in documents and not body.get("doc_as_upsert"):
                raise Refusal(404, "document_missing_exception", f"[{key}]: document missing")
            body = {**documents.get(key, {}), **body["doc"]}
        self._map(self.indices[name]["mappings"].setdefault("properties", {}), body, key)
        is_new = key not in documents
        documents[key] = body
        return 201 if is_new else 200

    def _map(self, properties: dict, source: dict, key: str) -> None:
        """Add what a document has and the mapping has not; refuse what does not fit."""
        for name, value in source.items():
            values = [
                each for each in (value if isinstance(value, list) else [value]) if each is not None
            ]
            for each in values:
                if isinstance(each, dict):
                    inner = properties.setdefault(name, {"properties": {}})
                    self._map(inner["properties"], each, key)
                    continue
                kind = properties.setdefault(name, {"type": _dynamic(each)})["type"]
                try:
                    _PYTHON.get(kind, str)(each)
                except ValueError:
                    raise Refusal(
                        400,
                        "document_parsing_exception",
                        f"[1:9] failed to parse field [{name}] of type [{kind}] in document with "
                        f"id '{key}'. Preview of field's value: '{each}'",
                    ) from None


class _Handler(BaseHTTPRequestHandler):
    elastic: ElasticServer
    protocol_version = "HTTP/1.1"

    def _respond(self) -> None:
        url = urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        options = {name: values[0] for name, values in parse_qs(url.query).items()}
        with self.elastic.lock:
            self.elastic.requests.append((self.command, url.path, text))
            try:
                self._check_user()
                if refusal := self.elastic.is_broken(self.command, url.path):
                    raise refusal
                status, body = 200, self.elastic.answer(self.command, url.path, options, text)
            except Refusal as refusal:
                status, body = refusal.status, refusal.body
        content = b"" if self.command == "HEAD" or body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("X-Elastic-Product", "Elasticsearch")
        self.send_header("Content-Type", "application/vnd.elasticsearch+json;compatible-with=9")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _respond

    def _check_user(self) -> None:
        users = self.elastic.users
        scheme, _, token = self.headers.get("Authorization", " ").partition(" ")
        name, _, password = base64.b64decode(token).decode().partition(":")
        if users and (scheme != "Basic" or users.get(name) != password):
            reason = f"unable to authenticate user [{name}] for REST request [{self.path}]"
            raise Refusal(401, "security_exception", reason)

    def log_message(self, *_) -> None:
        pass


def _matches(source: dict, query: dict | None) -> bool:
    match query:
        case None | {"match_all": _}:
            return True
        case {"term": term}:
            ((name, value),) = term.items()
            return source.get(name) == value
        case {"query_string": {"query": text}}:
            name, _, value = text.partition(":")
            return str(source.get(name)) == value
    raise Refusal(400, "parsing_exception", f"unknown query {query}")


def _filtered(source: dict, includes=(), excludes=(), parent: str = "") -> dict:
    def among(path: str, patterns) -> bool:
        return any(fnmatchcase(path, end) for each in patterns for end in (each, f"{each}.*"))

    kept = {}
    for name, value in source.items():
        path = parent + name
        if isinstance(value, dict):
            value = _filtered(value, includes, excludes, f"{path}.")
            if not value:
                continue
        elif (includes and not among(path, includes)) or among(path, excludes):
            continue
        kept[name] = value
    return kept


def _dynamic(value) -> str:
    """The type that a server finds for the first value of a field."""
    if isinstance(value, str):
        is_date = len(value) >= 10 and value[:10].replace("-", "").isdigit() and value[4] == "-"
        return "date" if is_date else "text"
    return {bool: "boolean", int: "long", float: "float"}[type(value)]


@contextlib.contextmanager
def elastic_server() -> Iterator[ElasticServer]:
    server = ElasticServer()
    try:
        yield server
    finally:
        server.stop()
