"""Exchange of data between Spark and Elasticsearch with the official Python client.

Spark tasks connect to the servers. An index is read at one point in time and divided into slices,
one per partition. Settings have the names of Elastic's Spark connector, which is not needed.
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
"""  # the last six have no effect: only the servers of es.nodes are used
_HEADER = "es.net.http.header."
_ERROR_TEXTS = {  # by the status of a response
    None: "does not answer: check es.nodes, es.port and es.net.ssl, and that it is running",
    401: "rejects the user: check es.net.http.auth.user and es.net.http.auth.pass",
    403: "denies this to the user of es.net.http.auth.user: use one with more privileges",
    404: "has no such index: check esResource and es.nodes",
    410: "closed the point in time after es.scroll.keepalive without a search: read the index "
    "again, persist the DataFrame, or set a longer time",
}
_UNITS = {"": 1, "kb": 1 << 10, "mb": 1 << 20, "ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}
_MAX_SLICES = 1024  # default of index.max_slices_per_pit
_TYPES = {  # mapping types with another name in Spark; unknown types become strings
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

    It contains the documents at the time of this call, also if it is recomputed.

    Parameters
    ----------
    esConfig : dict
        Settings of Elastic's Spark connector, such as ``{"es.nodes": "10.0.0.7"}``.
    esResource : str
        Index, comma-separated indices, or a pattern; a suffix after a slash is ignored.
    schema : pyspark.sql.types.StructType, optional
        Columns, by default the fields of the index's mapping.

    Returns
    -------
    pyspark.sql.DataFrame
        Each partition is a slice of the index.

    Raises
    ------
    UsageError
        If the servers do not answer or reject the user, the index does not exist, or a setting is
        unknown. In a task: if a value does not match the type of its column.

    Examples
    --------
    >>> from bigdl.orca.data import elastic_search
    >>> config = {"es.nodes": "127.0.0.1", "es.port": "1", "es.http.retries": "0"}
    >>> df = elastic_search.read_df(config, "clicks")  # no server on this port
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
    arrow_type = arrow_schema(schema)

    def read(batches):
        import pyarrow as pa

        for index in (each for batch in batches for each in batch.column(0).to_pylist()):
            for page in _pages(settings, slices[index]):
                rows = [_convert(source, schema, "") for _, source in page]
                yield pa.RecordBatch.from_pylist(rows, schema=arrow_type)

    indices = spark.range(0, len(slices), 1, len(slices))
    return indices.mapInArrow(silent_when_closed(read), schema)


def read_rdd(
    esConfig: Mapping[str, Any],
    esResource: str | None = None,
    filter: str | None = None,
    esQuery: str | None = None,
) -> RDD:
    """Read an index as an RDD of pairs ``(document id, document)``; each document is a dict.

    Parameters
    ----------
    esConfig, esResource
        As in :func:`read_df`; `esConfig` may contain the resource.
    filter : str, optional
        Comma-separated names of the fields to read, by default all.
    esQuery : str, optional
        Query of the documents: ``?q=…``, or JSON such as ``{"query": {"match_all": {}}}``.

    Examples
    --------
    >>> from bigdl.orca.data import elastic_search
    >>> config = {"es.nodes": "127.0.0.1", "es.port": "1", "es.http.retries": "0"}
    >>> pairs = elastic_search.read_rdd(config, "clicks", filter="user,item", esQuery="?q=user:7")
    Traceback (most recent call last):
        ...
    bigdl.common.errors.UsageError: Elasticsearch at http://127.0.0.1:1 does not answer: check ...
    """
    arguments = {"es.read.source.filter": filter, "es.query": esQuery}
    config = {**esConfig, **{key: text for key, text in arguments.items() if text is not None}}
    settings = _ElasticsearchSettings(config, esResource, "read")
    sc = SparkCluster.active_or_local().sc
    slices = _open(settings, sc.defaultParallelism)

    def read(slice_: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        for page in _pages(settings, slice_):
            yield from page

    return sc.parallelize(slices, len(slices)).flatMap(read)


def write_df(esConfig: Mapping[str, Any], esResource: str, df: DataFrame) -> None:
    """Write each row of a Spark DataFrame as a document, in parallel Spark tasks.

    Parameters
    ----------
    esConfig : dict
        Settings of Elastic's Spark connector. ``es.mapping.id`` names the column of document ids;
        without it, a repeated Spark task may write documents twice.
    esResource : str
        Index. With ``es.write.operation`` ``"index"``, the default, it must be empty.
    df : pyspark.sql.DataFrame
        Rows to write.

    Raises
    ------
    UsageError
        If the servers do not answer or reject the user or a document, the index has documents, or
        a setting is unknown.

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
            f"es.write.operation={operation} needs es.mapping.id, the column of document ids",
            code="argument-missing",
            argument="es.mapping.id",
        )
    with settings.client() as client:
        exists = client.indices.exists(index=index)
        if not exists and not settings.flag("es.index.auto.create"):
            raise UsageError(
                f"There is no index {index!r}, and es.index.auto.create=false",
                code="path-missing",
                path=index,
            )
        if exists and operation == "index" and client.count(index=index)["count"]:
            raise UsageError(
                f"Index {index!r} already has documents: delete it, write to another index, or add "
                'documents with es.write.operation "create", or "upsert" with es.mapping.id',
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
            f"the others were not sent: {why[0]}",
            code="cluster-refused",
            path=index,
        )
    if settings.flag("es.batch.write.refresh") and written:
        with settings.client() as client:
            client.indices.refresh(index=index)


def flatten_df(df: DataFrame) -> DataFrame:
    """Return a DataFrame with a column for each field of its structs, including nested structs.

    Columns are named after the fields; fields with equal names are named by their path, joined with
    ``_``.

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
    """Return the paths of a schema's fields that are not structs, including nested fields."""
    paths: list[tuple[str, ...]] = []
    for field in schema:
        path = (*parents, field.name)
        is_struct = field.dataType.typeName() == "struct"
        paths += _leaves(field.dataType, *path) if is_struct else [path]
    return paths


class _ElasticsearchSettings(dict[str, str]):
    """Settings of `esConfig` with all defaults; pickled to tasks."""

    def __init__(self, config: Mapping[str, Any], resource: str | None, use: str):
        if not isinstance(config, Mapping):
            raise UsageError(
                f'esConfig should be a dict such as {{"es.nodes": …}}, got {config!r}',
                code="argument-type",
                argument="esConfig",
            )
        super().__init__(each.split("=") for each in _DEFAULTS.split())
        user_settings = {str(key): str(value) for key, value in config.items() if value is not None}
        if unknown := [
            key for key in user_settings if key not in self and not key.startswith(_HEADER)
        ]:
            raise UsageError(
                f"esConfig has no setting {', '.join(map(repr, unknown))}; it has "
                f"{', '.join(sorted(self))} and {_HEADER}<name>",
                code="argument-unknown",
                argument="esConfig",
                allowed=list(self),
            )
        numeric = [key for key, value in self.items() if value[:1].isdigit()]
        self.update(user_settings)
        for key in numeric:
            self.number(key)
        resource = resource or self[f"es.resource.{use}"] or self["es.resource"]
        if not resource or "{" in resource:
            raise UsageError(
                f"esResource should be the name of an index, got {resource!r}",
                code="argument-value",
                argument="esResource",
            )
        self["index"] = resource.strip("/").partition("/")[0]  # old programs append a mapping type

    def flag(self, key: str) -> bool:
        return check_choice(key, self[key].lower(), ["true", "false", "yes", "no"]) in "true yes"

    def names(self, key: str) -> list[str]:
        """Return a comma-separated setting as a list of names."""
        return [name.strip() for name in self[key].split(",") if name.strip()]

    def field_patterns(self) -> tuple[list[str], list[str]]:
        """Return the patterns of fields to include and to exclude."""
        include = self.names("es.read.source.filter") + self.names("es.read.field.include")
        return include or ["*"], self.names("es.read.field.exclude")

    def number(self, key: str, unit: str = "") -> float:
        """Parse a number, a size such as 1mb (in bytes) or a duration such as 10s (in seconds)."""
        match = re.fullmatch(r"(\d+)([a-z]*)", self[key].strip().lower())
        if match is None or (match[2] or unit) not in _UNITS:
            raise UsageError(
                f"{key} should be a number, such as 10, 10s or 10mb, got {self[key]}",
                code="argument-value",
                argument=key,
            )
        return int(match[1]) * _UNITS[match[2] or unit]

    def query(self) -> dict[str, Any] | None:
        """Parse es.query, given as ``?q=`` or as JSON."""
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
        """Return the addresses of the servers."""
        scheme = "https" if self.flag("es.net.ssl") else "http"
        path = self["es.nodes.path.prefix"].strip("/")
        if "@" in self["es.nodes"]:
            raise UsageError(
                "es.nodes must not contain a user; set es.net.http.auth.user and .pass instead",
                code="argument-value",
                argument="es.nodes",
            )
        urls = []
        with as_usage_error(
            f"es.nodes should be host names, got {self['es.nodes']!r}",
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
        """Context manager that yields a client and converts the client's errors to UsageError."""
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
            problem = _ERROR_TEXTS.get(status, "refuses the request")
            reason = error if status else error.message
            raise UsageError(
                f"Elasticsearch at {', '.join(urls)} {problem} ({reason})",
                code="cluster-unreachable",
                address=list(urls),
            ) from None


# reading ----------------------------------------------------------------------------------------


def _open(settings: _ElasticsearchSettings, slots: int) -> list[dict[str, Any]]:
    """Open an Elasticsearch point in time, and return the search request of each of its slices."""
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
    """Yield pages of a slice's documents with their ids."""
    include, exclude = settings.field_patterns()
    search = {**search, "source": {"includes": include, "excludes": exclude}}
    search |= {"size": int(settings.number("es.scroll.size")), "sort": "_shard_doc"}
    search |= {"track_total_hits": False, "allow_partial_search_results": False}
    with settings.client() as client:
        while hits := (response := client.search(**search))["hits"]["hits"]:
            yield [(hit["_id"], hit["_source"]) for hit in hits]
            search["search_after"] = hits[-1]["sort"]
            search["pit"] = {**search["pit"], "id": response["pit_id"]}


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
            "select others with es.read.field.include, or pass schema=",
            code="data-schema",
            path=index,
        )
    return StructType(list(fields.values()))


def _struct(
    settings: _ElasticsearchSettings, properties: Mapping[str, Any], parent: str
) -> StructType:
    """Return the Spark struct type of the selected fields of an Elasticsearch object."""
    from pyspark.sql.types import ArrayType, StringType, StructType

    include, exclude = settings.field_patterns()
    rich = settings.flag("es.mapping.date.rich")
    depths = {}
    for each in settings.names("es.read.field.as.array.include"):
        path, _, depth = each.partition(":")
        depths[path] = int(depth or 1)
    struct = StructType()
    for name, field in properties.items():
        path, field_type = parent + name, field.get("type", "object")
        spark_type: Any
        if "properties" in field:
            spark_type = _struct(settings, field["properties"], f"{path}.")
            if not spark_type.names:
                continue
        elif field_type == "alias" or not _is_in(path, include) or _is_in(path, exclude):
            continue
        elif field_type.startswith("date") and (
            "epoch_second" in field.get("format", "") or not rich
        ):
            spark_type = StringType()
        else:
            known = field_type if field_type in _PARSERS else "string"
            spark_type = data_type(_TYPES.get(field_type, known))
        for _ in range(depths.get(path, field_type == "nested")):
            spark_type = ArrayType(spark_type)
        struct.add(name, spark_type)
    return struct


def _is_in(path: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatchcase(path, end) for each in patterns for end in (each, f"{each}.*"))


def _convert(value: Any, data_type: Any, path: str) -> object:
    """Convert a value of a document to a Spark type."""
    name = data_type.typeName()
    if value is None or (value == "" and name != "string"):
        return None
    if isinstance(value, list) and name != "array":
        raise UsageError(
            f"The field {path} of a document has several values: add it to "
            "es.read.field.as.array.include, or pass schema= with an array",
            code="data-structure",
            column=path,
        )
    with as_usage_error(
        f"The field {path} of a document is {value!r}, which is not of type {name}",
        "; pass schema= with another type, such as string",
        code="data-dtype",
        column=path,
    ):
        if name == "struct":
            return {
                each.name: _convert(
                    _field_value(value, each.name), each.dataType, f"{path}.{each.name}".strip(".")
                )
                for each in data_type
            }
        if name == "array":
            values = value if isinstance(value, list) else [value]
            return [_convert(each, data_type.elementType, path) for each in values]
        return _PARSERS[name](value)


def _field_value(value: dict[str, Any], name: str) -> object:
    """Return the value of a field, or a dict of the fields whose names start with ``<name>.``."""
    if name in value:
        return value[name]
    start = f"{name}."
    return {key.removeprefix(start): value[key] for key in value if key.startswith(start)} or None


def _time(value: str | float) -> datetime.datetime:
    """Parse an ISO 8601 timestamp, in UTC by default, or a number of milliseconds since 1970."""
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
    """Write a partition's rows; yield the counts of written and rejected rows and the first error.

    Errors of the servers are not raised, because Spark would repeat the task and write documents
    again.
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
            for done, response in bulk(client, _actions(settings, batches), **options):
                counts[not done] += 1
                if not done and why is None:
                    (item,) = response.values()
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
    """Yield the commands of a bulk request with their document bodies."""
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
