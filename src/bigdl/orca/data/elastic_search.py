"""Spark DataFrames and RDDs from Elasticsearch, and DataFrames into it, by the official client.

Tasks of Spark talk to the servers. An index is read from one point in time, cut into slices: every
partition is a slice. Settings have the names of Elastic's own connector for Spark, which is not
used.
"""

from __future__ import annotations

import atexit
import base64
import contextlib
import datetime
import decimal
import fnmatch
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from bigdl.common.checks import check_choice
from bigdl.common.errors import LazyModule, UsageError, as_usage_error, require
from bigdl.orca.cluster.connect import active_spark_or_local
from bigdl.orca.cluster.spark import SparkCluster
from bigdl.orca.cluster.spark_calls import silent_when_closed
from bigdl.orca.cluster.versions import arrow_schema, data_type
from bigdl.runtime.shards.columns import quoted

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType

elasticsearch = LazyModule("elasticsearch", "elasticsearch")

__all__ = ["elastic_search", "flatten_df", "read_df", "read_rdd", "write_df"]

elastic_search = sys.modules[__name__]  # BigDL 2.x had a class of this name in this module

_DEFAULTS = """
es.nodes=localhost es.port=9200 es.nodes.path.prefix= es.http.timeout=1m es.http.retries=3
es.net.http.auth.user= es.net.http.auth.pass= es.net.ssl=false
es.net.ssl.cert.allow.self.signed=false es.net.ssl.truststore.location=
es.resource= es.resource.read= es.resource.write= es.query= es.mapping.date.rich=true
es.read.source.filter= es.read.field.include= es.read.field.exclude=
es.read.field.as.array.include= es.scroll.size=1000 es.scroll.keepalive=1h
es.input.max.docs.per.partition= es.write.operation=index es.mapping.id= es.mapping.exclude=
es.index.auto.create=true es.batch.size.entries=1000 es.batch.size.bytes=1mb
es.batch.write.refresh=true es.batch.write.retry.count=3
es.nodes.wan.only= es.nodes.discovery= es.nodes.client.only= es.nodes.data.only=
es.nodes.ingest.only= es.nodes.resolve.hostname=
"""  # the last six choose among servers: those of es.nodes are asked here, and no others
_HEADER = "es.net.http.header."
_SENTENCES = {  # by the status of an answer
    None: "does not answer: check es.nodes, es.port and es.net.ssl, and that it runs",
    401: "does not know the user: check es.net.http.auth.user and es.net.http.auth.pass",
    403: "does not let the user of es.net.http.auth.user do this: use one with more rights",
    404: "has no such index: check esResource and es.nodes",
    410: "let go of what was read, since nobody searched it for the time of es.scroll.keepalive: "
    "read it again, persist what was read, or set a longer time",
}
_UNITS = {"": 1, "kb": 1 << 10, "mb": 1 << 20, "ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_SLICES = 1024  # index.max_slices_per_pit of a server, unless it is set
_TYPES = {  # of a mapping, where Spark has another name; what Spark does not know is text
    "unsigned_long": "decimal(20,0)",
    "half_float": "float",
    "scaled_float": "double",
    "date": "timestamp",
    "date_nanos": "timestamp",
    "dense_vector": "array<float>",
}


def read_df(
    esConfig: Mapping[str, Any], esResource: str, schema: StructType | None = None
) -> DataFrame:
    """Read an index as a Spark DataFrame.

    It holds the documents of the moment of this call, however often it is computed.

    Parameters
    ----------
    esConfig : dict
        Settings of Elastic's connector for Spark, such as ``{"es.nodes": "10.0.0.7"}``.
    esResource : str
        An index, several with commas between, or a pattern; what follows a slash is left out.
    schema : pyspark.sql.types.StructType, optional
        The columns; default: the fields of the index's mapping.

    Returns
    -------
    pyspark.sql.DataFrame
        Each partition is a slice of the index.

    Raises
    ------
    UsageError
        If the servers do not answer or refuse the user, if there is no such index, for a setting
        that is not known. In a task: if a value does not fit the type of its column.

    Examples
    --------
    >>> from bigdl.orca.data import elastic_search
    >>> config = {"es.nodes": "127.0.0.1", "es.port": "1", "es.http.retries": "0"}
    >>> df = elastic_search.read_df(config, "clicks")  # nothing listens at this port
    Traceback (most recent call last):
        ...
    bigdl.common.errors.UsageError: Elasticsearch at http://127.0.0.1:1 does not answer: check ...
    """

    settings = _ElasticsearchSettings(esConfig, esResource, "read")
    cluster = active_spark_or_local()
    spark = cluster.spark
    if schema is None:
        schema = _schema_of_mapping(settings)
    else:
        settings["es.read.field.include"] = ",".join(map(".".join, _leaves(schema)))
    slices = _open(settings, cluster.parallelism)
    of_arrow = arrow_schema(schema)

    def read(batches):
        import pyarrow as pa

        for number in (each for batch in batches for each in batch.column(0).to_pylist()):
            for page in _pages(settings, slices[number]):
                rows = [_parsed(source, schema, "") for _, source in page]
                yield pa.RecordBatch.from_pylist(rows, schema=of_arrow)

    numbers = spark.range(0, len(slices), 1, len(slices))
    return numbers.mapInArrow(silent_when_closed(read), schema)


def read_rdd(
    esConfig: Mapping[str, Any],
    esResource: str | None = None,
    filter: str | None = None,
    esQuery: str | None = None,
) -> RDD:
    """Read an index as an RDD of pairs: the id of a document, and the document as a dict.

    Parameters
    ----------
    esConfig, esResource
        As of :func:`read_df`; `esConfig` may hold the resource.
    filter : str, optional
        Names of the fields to read, with commas between; default: all.
    esQuery : str, optional
        Which documents: ``?q=…``, or JSON such as ``{"query": {"match_all": {}}}``.

    Examples
    --------
    >>> from bigdl.orca.data import elastic_search
    >>> config = {"es.nodes": "127.0.0.1", "es.port": "1", "es.http.retries": "0"}
    >>> pairs = elastic_search.read_rdd(config, "clicks", filter="user,item", esQuery="?q=user:7")
    Traceback (most recent call last):
        ...
    bigdl.common.errors.UsageError: Elasticsearch at http://127.0.0.1:1 does not answer: check ...
    """
    asked = {"es.read.source.filter": filter, "es.query": esQuery}
    config = {**esConfig, **{key: text for key, text in asked.items() if text is not None}}
    settings = _ElasticsearchSettings(config, esResource, "read")
    sc = SparkCluster.active_or_local().sc
    slices = _open(settings, sc.defaultParallelism)

    def read(slice_: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for page in _pages(settings, slice_):
            yield from page

    return sc.parallelize(slices, len(slices)).flatMap(read)


def write_df(esConfig: Mapping[str, Any], esResource: str, df: DataFrame) -> None:
    """Write the rows of a Spark DataFrame as documents, by its tasks.

    Parameters
    ----------
    esConfig : dict
        Settings of Elastic's connector for Spark. The column ``es.mapping.id`` holds the ids of
        the documents; without it a task that Spark runs again may write some twice.
    esResource : str
        The index. With ``es.write.operation`` ``"index"``, the default, it must hold no documents.
    df : pyspark.sql.DataFrame

    Raises
    ------
    UsageError
        If the servers do not answer or refuse the user or a document, if the index holds
        documents, for a setting that is not known.

    Examples
    --------
    >>> from bigdl.orca import OrcaContext
    >>> from bigdl.orca.data import elastic_search
    >>> config = {"es.nodes": "127.0.0.1", "es.port": "1", "es.http.retries": "0"}
    >>> df = OrcaContext.get_spark_session().range(3)
    >>> elastic_search.write_df({**config, "es.mapping.id": "id"}, "clicks", df)
    Traceback (most recent call last):
        ...
    bigdl.common.errors.UsageError: Elasticsearch at http://127.0.0.1:1 does not answer: check ...
    """
    from pyspark.sql import functions as F

    settings = _ElasticsearchSettings(esConfig, esResource, "write")
    index, operation = settings["index"], settings["es.write.operation"]
    operations = ["index", "create", "update", "upsert", "delete"]
    check_choice("es.write.operation", operation, operations)
    if operation in operations[2:] and not settings["es.mapping.id"]:
        raise UsageError(
            f"es.write.operation={operation} needs es.mapping.id, the column of ids",
            code="argument-missing",
            argument="es.mapping.id",
        )
    with settings.client() as client:
        is_there = client.indices.exists(index=index)
        if not is_there and not settings.flag("es.index.auto.create"):
            raise UsageError(
                f"There is no index {index!r}, and es.index.auto.create=false",
                code="path-missing",
                path=index,
            )
        if is_there and operation == "index" and client.count(index=index)["count"]:
            raise UsageError(
                f"Index {index!r} holds documents already: delete it, write to another one, or add "
                'to it by es.write.operation "create", or "upsert" for the ids of es.mapping.id',
                code="path-exists",
                path=index,
            )
    fields = df.drop(*settings.names("es.mapping.exclude")).columns
    ids = F.col(settings["es.mapping.id"]) if settings["es.mapping.id"] else F.lit(None)
    rows = df.select(F.to_json(F.struct(*map(quoted, fields))), ids.cast("string"))
    schema = "written long, refused long, why string"
    outcomes = rows.mapInArrow(lambda batches: _write(settings, batches), schema).collect()
    written, refused = (sum(each[n] for each in outcomes) for n in (0, 1))
    if why := [each["why"] for each in outcomes if each["why"]]:
        raise UsageError(
            f"{written:,} documents were written to index {index!r}, {refused:,} were refused and "
            f"the rest was not sent: {why[0]}",
            code="cluster-refused",
            path=index,
        )
    if settings.flag("es.batch.write.refresh") and written:
        with settings.client() as client:
            client.indices.refresh(index=index)


def flatten_df(df: DataFrame) -> DataFrame:
    """Return a DataFrame with a column for each field of its structs, however deep.

    A column has the name of the field; where several have the same, their paths with ``_`` between.

    Examples
    --------
    >>> from bigdl.orca import OrcaContext
    >>> from bigdl.orca.data.elastic_search import flatten_df
    >>> spark = OrcaContext.get_spark_session()
    >>> df = spark.sql("SELECT 7 AS user, struct(1 AS id, 'a' AS tag) AS item")
    >>> flatten_df(df).columns
    ['user', 'id', 'tag']
    """
    from pyspark.sql import functions as F

    paths = _leaves(df.schema)
    times = Counter(path[-1] for path in paths)
    names = [path[-1] if times[path[-1]] == 1 else "_".join(path) for path in paths]
    columns = [F.col(".".join(map(quoted, path))) for path in paths]
    return df.select(*map(F.Column.alias, columns, names))


def _leaves(schema: Any, *parents: str) -> list[tuple[str, ...]]:
    """Paths of the fields that are no structs."""
    paths: list[tuple[str, ...]] = []
    for field in schema:
        path = (*parents, field.name)
        is_struct = field.dataType.typeName() == "struct"
        paths += _leaves(field.dataType, *path) if is_struct else [path]
    return paths


class _ElasticsearchSettings(dict[str, str]):
    """The settings in `esConfig`, with all defaults; pickled to tasks."""

    def __init__(self, config: Mapping[str, Any], resource: str | None, use: str):
        if not isinstance(config, Mapping):
            raise UsageError(
                f'esConfig should be a dict such as {{"es.nodes": …}}, got {config!r}',
                code="argument-type",
                argument="esConfig",
            )
        super().__init__(each.split("=") for each in _DEFAULTS.split())
        given = {str(key): str(value) for key, value in config.items() if value is not None}
        if unknown := [key for key in given if key not in self and not key.startswith(_HEADER)]:
            raise UsageError(
                f"esConfig has no setting {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(sorted(self))} and {_HEADER}<name>",
                code="argument-unknown",
                argument="esConfig",
                allowed=list(self),
            )
        numbers = [key for key, value in self.items() if value[:1].isdigit()]
        self.update(given)
        for key in numbers:
            self.number(key)
        resource = resource or self[f"es.resource.{use}"] or self["es.resource"]
        if not resource or "{" in resource:
            raise UsageError(
                f"esResource should be the name of an index, got {resource!r}",
                code="argument-value",
                argument="esResource",
            )
        self["index"] = resource.strip("/").partition("/")[0]  # a type follows in old programs

    def flag(self, key: str) -> bool:
        return check_choice(key, self[key].lower(), ["true", "false", "yes", "no"]) in "true yes"

    def names(self, key: str) -> list[str]:
        """Names with commas between."""
        return [name.strip() for name in self[key].split(",") if name.strip()]

    def wanted(self) -> tuple[list[str], list[str]]:
        """Patterns of the fields to read, and of those among them that are left out."""
        include = self.names("es.read.source.filter") + self.names("es.read.field.include")
        return include or ["*"], self.names("es.read.field.exclude")

    def number(self, key: str, unit: str = "") -> float:
        """A number, a size such as 1mb in bytes, or a time such as 10s in seconds."""
        match = re.fullmatch(r"(\d+)([a-z]*)", self[key].strip().lower())
        if match is None or (match[2] or unit) not in _UNITS:
            raise UsageError(
                f"{key} should be a number, such as 10, 10s or 10mb, got {self[key]}",
                code="argument-value",
                argument=key,
            )
        return int(match[1]) * _UNITS[match[2] or unit]

    def query(self) -> dict[str, Any] | None:
        """The query of es.query: after ``?q=``, or as JSON."""
        text = self["es.query"].strip()
        if not text or text.startswith("?q="):
            return {"query_string": {"query": text[3:]}} if text else None
        with as_usage_error(
            f'es.query should be ?q=… or JSON such as {{"query": …}}, got {text}',
            code="argument-value",
            argument="es.query",
        ):
            (query,) = {"query": None, **json.loads(text)}.values()
        return query

    def urls(self) -> list[str]:
        """Addresses of the servers."""
        scheme = "https" if self.flag("es.net.ssl") else "http"
        path = self["es.nodes.path.prefix"].strip("/")
        if "@" in self["es.nodes"]:
            raise UsageError(
                "es.nodes names a user; give es.net.http.auth.user and .pass instead",
                code="argument-value",
                argument="es.nodes",
            )
        urls = []
        with as_usage_error(
            f"es.nodes should be names of hosts, got {self['es.nodes']!r}",
            code="argument-value",
            argument="es.nodes",
        ):
            for node in self["es.nodes"].split(","):
                parts = urlsplit(node.strip() if "://" in node else f"{scheme}://{node.strip()}")
                port = parts.port or self["es.port"]
                host = parts.netloc.removesuffix(f":{parts.port}")
                urls.append(f"{parts.scheme}://{host}:{port}/{path}".rstrip("/"))
        return urls

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """A client; what the servers refuse, or that they do not answer, is a UsageError."""
        urls, user = self.urls(), self["es.net.http.auth.user"]
        options: dict[str, Any] = {
            "headers": {k.removeprefix(_HEADER): self[k] for k in self if k.startswith(_HEADER)},
            "request_timeout": self.number("es.http.timeout", "ms"),
            "max_retries": int(self.number("es.http.retries")),
            "basic_auth": (user, self["es.net.http.auth.pass"]) if user else None,
        }
        if urls[0].startswith("https"):
            options["ca_certs"] = self["es.net.ssl.truststore.location"] or None
            options["verify_certs"] = not self.flag("es.net.ssl.cert.allow.self.signed")
            options["ssl_show_warn"] = False
        try:
            with elasticsearch.Elasticsearch(urls, **options) as client:
                yield client
        except (elasticsearch.ApiError, elasticsearch.TransportError) as error:
            is_expired = "search_context_missing" in str(error)
            status = 410 if is_expired else getattr(error, "status_code", None)
            sentence = _SENTENCES.get(status, "refuses what it was asked")
            reason = error if status else error.message
            raise UsageError(
                f"Elasticsearch at {', '.join(urls)} {sentence} ({reason})",
                code="cluster-unreachable",
                address=list(urls),
            ) from None


# reading ----------------------------------------------------------------------------------------


def _open(settings: _ElasticsearchSettings, slots: int) -> list[dict[str, Any]]:
    """Open a point in time, and return the searches of its slices."""
    query, keep = settings.query(), f"{settings.number('es.scroll.keepalive', 'ms'):.0f}s"
    with settings.client() as client:
        rows = client.count(index=settings["index"], query=query)["count"]
        point = client.open_point_in_time(index=settings["index"], keep_alive=keep)["id"]
    atexit.register(_close, settings, point)
    if settings["es.input.max.docs.per.partition"]:
        slots = math.ceil(rows / settings.number("es.input.max.docs.per.partition"))
    number = max(1, min(slots, rows, _MAX_SLICES))
    slices = [{"slice": {"id": i, "max": number}} for i in range(number)] if number > 1 else [{}]
    return [{"pit": {"id": point, "keep_alive": keep}, "query": query, **each} for each in slices]


def _close(settings: _ElasticsearchSettings, point: str) -> None:
    settings.update({"es.http.timeout": "2s", "es.http.retries": "0"})
    with contextlib.suppress(UsageError), settings.client() as client:
        client.close_point_in_time(id=point)


def _pages(
    settings: _ElasticsearchSettings, search: dict[str, Any]
) -> Iterator[list[tuple[str, dict]]]:
    """The documents of a slice with their ids, page by page."""
    include, exclude = settings.wanted()
    search = {**search, "source": {"includes": include, "excludes": exclude}}
    search |= {"size": int(settings.number("es.scroll.size")), "sort": "_shard_doc"}
    search |= {"track_total_hits": False, "allow_partial_search_results": False}
    with settings.client() as client:
        while hits := (answer := client.search(**search))["hits"]["hits"]:
            yield [(hit["_id"], hit["_source"]) for hit in hits]
            search["search_after"] = hits[-1]["sort"]
            search["pit"] = {**search["pit"], "id": answer["pit_id"]}


def _schema_of_mapping(settings: _ElasticsearchSettings) -> StructType:
    from pyspark.sql.types import StructType

    index = settings["index"]
    with settings.client() as client:
        mappings = client.indices.get_mapping(index=index).values()
    schemas = [_struct(settings, each["mappings"].get("properties", {}), "") for each in mappings]
    fields = {field.name: field for schema in schemas for field in schema}
    if not fields or any(fields[field.name] != field for schema in schemas for field in schema):
        raise UsageError(
            f"Index {index!r} has {'fields of several types' if fields else 'no such fields'}: "
            "choose others by es.read.field.include, or give schema=",
            code="data-schema",
            path=index,
        )
    return StructType(list(fields.values()))


def _struct(
    settings: _ElasticsearchSettings, properties: Mapping[str, Any], parent: str
) -> StructType:
    """Spark's type of an object with these fields, of those that are asked for."""
    from pyspark.sql.types import ArrayType, StringType, StructType

    include, exclude = settings.wanted()
    rich = settings.flag("es.mapping.date.rich")
    depths = {}
    for each in settings.names("es.read.field.as.array.include"):
        path, _, depth = each.partition(":")
        depths[path] = int(depth or 1)
    struct = StructType()
    for name, field in properties.items():
        path, kind = parent + name, field.get("type", "object")
        of_field: Any
        if "properties" in field:
            of_field = _struct(settings, field["properties"], f"{path}.")
            if not of_field.names:
                continue
        elif kind == "alias" or not _is_in(path, include) or _is_in(path, exclude):
            continue
        elif kind.startswith("date") and ("epoch_second" in field.get("format", "") or not rich):
            of_field = StringType()
        else:
            known = kind if kind in _PARSERS else "string"
            of_field = data_type(_TYPES.get(kind, known))
        for _ in range(depths.get(path, kind == "nested")):
            of_field = ArrayType(of_field)
        struct.add(name, of_field)
    return struct


def _is_in(path: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, end) for each in patterns for end in (each, f"{each}.*"))


def _parsed(value: Any, data_type: Any, path: str) -> Any:
    """A value of a document as one of a type of Spark."""
    name = data_type.typeName()
    if value is None or (value == "" and name != "string"):
        return None
    if isinstance(value, list) and name != "array":
        raise UsageError(
            f"The field {path} of a document has several values: name it in "
            "es.read.field.as.array.include, or give schema= with an array",
            code="data-structure",
            column=path,
        )
    with as_usage_error(
        f"The field {path} of a document is {value!r}, which is no {name}",
        "; give schema= with another type, such as string",
        code="data-dtype",
        column=path,
    ):
        if name == "struct":
            return {
                each.name: _parsed(
                    _member(value, each.name), each.dataType, f"{path}.{each.name}".strip(".")
                )
                for each in data_type
            }
        if name == "array":
            values = value if isinstance(value, list) else [value]
            return [_parsed(each, data_type.elementType, path) for each in values]
        return _PARSERS[name](value)


def _member(value: dict[str, Any], name: str) -> Any:
    """A field, or an object of those whose names begin with its name and a dot."""
    if name in value:
        return value[name]
    start = f"{name}."
    return {key.removeprefix(start): value[key] for key in value if key.startswith(start)} or None


def _time(value: Any) -> datetime.datetime:
    """A time as ISO 8601 writes it, in UTC if it says no zone, or in milliseconds since 1970."""
    if isinstance(value, int | float):
        return datetime.datetime.fromtimestamp(value / 1000, datetime.UTC)
    time = datetime.datetime.fromisoformat(value)
    return time if time.tzinfo else time.replace(tzinfo=datetime.UTC)


_PARSERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("byte", "short", "integer", "long"), int),
    **dict.fromkeys(("float", "double"), float),
    "boolean": lambda value: {"true": True, "false": False}[str(value).lower()],
    "decimal": lambda value: decimal.Decimal(str(value)),
    "string": lambda value: value if isinstance(value, str) else json.dumps(value),
    "binary": base64.b64decode,
    "timestamp": _time,
    "date": lambda value: _time(value).date(),
}


# writing ----------------------------------------------------------------------------------------


def _write(settings: _ElasticsearchSettings, batches: Iterator[Any]) -> Iterator[Any]:
    """Write the rows of a partition; yield how many were written, how many were not, and why.

    No error of the servers is raised: Spark would run the task again, and write documents again.
    """
    import pyarrow as pa

    bulk = require("elasticsearch.helpers", "elasticsearch").streaming_bulk
    options = {
        "expand_action_callback": lambda action: action,
        "chunk_size": int(settings.number("es.batch.size.entries")),
        "max_chunk_bytes": int(settings.number("es.batch.size.bytes")),
        "max_retries": int(settings.number("es.batch.write.retry.count")),
        "raise_on_error": False,
    }
    counts = [0, 0]
    why = None
    try:
        with settings.client() as client:
            for done, answer in bulk(client, _actions(settings, batches), **options):
                counts[not done] += 1
                if not done and why is None:
                    (item,) = answer.values()
                    reason = item.get("error", {}).get("reason", f"status {item['status']}")
                    why = f"document {item['_id']!r}: {reason}"
    except UsageError as error:
        why = str(error)
    row = {"written": counts[0], "refused": counts[1], "why": why}
    schema = pa.schema({"written": pa.int64(), "refused": pa.int64(), "why": pa.string()})
    yield pa.RecordBatch.from_pylist([row], schema=schema)


def _actions(
    settings: _ElasticsearchSettings, batches: Iterator[Any]
) -> Iterator[tuple[dict, str | None]]:
    """Commands of a bulk request, each with the text that follows it."""
    operation, is_update = settings["es.write.operation"], {"update": "false", "upsert": "true"}
    for batch in batches:
        for text, key in zip(*(column.to_pylist() for column in batch), strict=True):
            if key is None and settings["es.mapping.id"]:
                raise UsageError(
                    f"es.mapping.id={settings['es.mapping.id']} is null in a row",
                    code="data-null",
                    column=settings["es.mapping.id"],
                )
            command = {"_index": settings["index"]} | ({} if key is None else {"_id": key})
            if operation in is_update:
                text = f'{{"doc": {text}, "doc_as_upsert": {is_update[operation]}}}'
                yield {"update": command}, text
            else:
                yield {operation: command}, None if operation == "delete" else text
