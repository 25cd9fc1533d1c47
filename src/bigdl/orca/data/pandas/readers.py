"""Functions that read CSV, JSON and Parquet files into XShards with Spark or pandas."""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import logging
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote

from bigdl.common.errors import UsageError, as_usage_error, first_line, hide_frames
from bigdl.orca.cluster.connect import active_spark_or_local
from bigdl.orca.cluster.ray import active_cluster, is_alone
from bigdl.orca.cluster.versions import data_type
from bigdl.orca.data.feeds.spark_dataframe import find_columns
from bigdl.orca.data.file import exists, files_of, is_local_path, open_file_system
from bigdl.orca.data.lake_tables import is_lake, open_table
from bigdl.orca.data.utils import process_spark_xshards
from bigdl.orca.data.xshards import RayXShards, SparkXShards
from bigdl.orca.data.xshards.connect import parallelize
from bigdl.orca.data.xshards.frames import F, frames_of, quoted, safe_names
from bigdl.orca.data.xshards.shards import DATA_FRAME, capture_failures
from bigdl.orca.settings import OrcaContext
from bigdl.runtime.shards.values import split_evenly

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow
    from pyspark.sql import DataFrame, DataFrameReader
    from pyspark.sql.types import StructType

logger = logging.getLogger("bigdl.orca")

_HEADER_BYTES = 1 << 20  # maximum length of a file's first line


def split_paths(file_path: str | os.PathLike | Sequence) -> list[str]:
    """Return the paths of a list, or of a comma-separated string."""
    items = file_path if isinstance(file_path, list | tuple) else [file_path]
    if not items or not all(isinstance(each, str | os.PathLike) for each in items):
        raise UsageError(
            f"file_path must be a str or a list of str, got {file_path!r}",
            code="argument-type",
            argument="file_path",
        )
    paths = []
    for each in map(os.fspath, items):
        is_one = "," not in each or (is_local_path(each) and exists(each))
        paths += [each] if is_one else [part.strip() for part in each.split(",") if part.strip()]
    return paths


def paths_for_spark(file_path) -> list[str]:
    """Convert paths to a list for Spark's readers, with existing local paths made absolute.

    On a single machine existing paths are made absolute, because the JVM may have another working
    directory.
    """
    is_one_machine = active_spark_or_local().is_local
    paths = split_paths(file_path)
    for i, path in enumerate(paths):
        if is_one_machine and is_local_path(path) and exists(path):
            paths[i] = "file://" + open_file_system(path)[1]
    return paths


@hide_frames
def read_csv(file_path: str | Sequence[str], **kwargs: Any) -> SparkXShards | RayXShards:
    r"""Read CSV files.

    Parameters
    ----------
    file_path : str or sequence of str
        File, directory, or glob pattern such as ``"data/*.csv"``; or several, in a list or
        separated by commas.  Local paths or URLs of remote storage.
    **kwargs
        With the backend ``"pandas"``, arguments of :func:`pandas.read_csv`.  With ``"spark"``:
        ``header`` (``"infer"``, 0 or None, which names the columns ``"0"``, ``"1"``, ...),
        ``names`` (a list, or a schema as a Spark DDL string), ``index_col``, ``usecols`` (names,
        indices or a function of a name), ``dtype`` (one, or a dict by column name or index),
        ``squeeze``, ``sep``, ``quotechar``, ``escapechar``, ``comment``, ``encoding`` (Python's
        name), and the options of Spark's CSV reader.  With indices in ``usecols``, ``names`` may
        contain names for these columns only.  Files with another column order are matched by
        their headers.

    Returns
    -------
    SparkXShards or RayXShards
        One pandas frame per partition.  Without a SparkContext, a local one is started.

    Raises
    ------
    UsageError
        If an argument is not supported, a file is empty and `names` is not given, a row has more
        fields than columns or an open quote (missing fields become null), or, with the backend
        ``"pandas"``, there is no file.
    pyspark.errors.AnalysisException
        If there is no file, with the backend ``"spark"``.

    Examples
    --------
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data.file import write_text
    >>> from bigdl.orca.data.pandas import read_csv
    >>> sc = init_orca_context("local", cores=2)
    >>> _ = write_text("ratings.csv", "user,item,rating\n1,7,5.0\n2,7,3.5\n")
    >>> shards = read_csv("ratings.csv", usecols=["user", "rating"], dtype={"user": "int32"})
    >>> shards.head()
       user  rating
    0     1     5.0
    1     2     3.5
    """
    if _is_with_pandas():
        return _read_with_pandas("csv", file_path, kwargs)
    return _read_csv(file_path, **kwargs)


@hide_frames
def read_json(file_path: str | Sequence[str], **kwargs: Any) -> SparkXShards | RayXShards:
    r"""Read JSON files.

    Parameters
    ----------
    file_path : str or sequence of str
        As for :func:`read_csv`.
    **kwargs
        With the backend ``"pandas"``, arguments of :func:`pandas.read_json`.  With ``"spark"``:
        ``names`` (of all columns, or of those in `usecols`), ``usecols`` (names, indices or a
        function of a name), ``dtype`` (one, or a dict by column name or index), ``index_col``,
        ``squeeze``, and options of Spark's reader, which expects one record per line
        (``multiLine=True`` for other files). Columns have the key order of the first record.

    Returns
    -------
    SparkXShards or RayXShards
        One pandas frame per partition.

    Examples
    --------
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data.file import write_text
    >>> from bigdl.orca.data.pandas import read_json
    >>> sc = init_orca_context("local", cores=2)
    >>> _ = write_text("cities.json", '{"city": "Oslo", "size": 7}\n{"city": "Rome", "size": 28}\n')
    >>> read_json("cities.json").head()
       city  size
    0  Oslo     7
    1  Rome    28
    """
    if _is_with_pandas():
        return _read_with_pandas("json", file_path, kwargs)
    return _read_json(file_path, **kwargs)


@hide_frames
def read_parquet(
    file_path: str | Sequence[str],
    columns: Sequence[str] | None = None,
    schema: StructType | pyarrow.Schema | str | None = None,
    **options: Any,
) -> SparkXShards | RayXShards:
    """Read Parquet files, or a Delta Lake or Iceberg table.

    Parameters
    ----------
    file_path : str or sequence of str
        As for :func:`read_csv`; or the path of one Delta Lake or Iceberg table, such as
        ``clicks@v5``.
    columns : sequence of str, optional
        Columns to read, by default all.
    schema : pyspark.sql.types.StructType, str or pyarrow.Schema, optional
        Schema of the files, if known; a pyarrow schema with the backend ``"pandas"``.
    **options
        Options of Spark's reader, or arguments of :func:`pandas.read_parquet`.

    Returns
    -------
    SparkXShards or RayXShards
        One pandas frame per partition.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.data.pandas import read_parquet
    >>> sc = init_orca_context("local", cores=2)
    >>> pd.DataFrame({"user": [1, 2], "age": [31, 45]}).to_parquet("users.parquet")
    >>> read_parquet("users.parquet", columns=["age"]).head()
       age
    0   31
    1   45
    """
    if isinstance(columns, str):
        columns = [columns]
    if is_lake(file_path):
        if schema is not None or options:
            unsupported = ["schema"] * (schema is not None) + list(options)
            raise UsageError(
                f"{', '.join(unsupported)} cannot be passed for {file_path}: a Delta or Iceberg "
                "table stores its schema; omit it",
                code="argument-conflict",
                path=file_path,
            )
        return _read_lake(file_path, columns)
    if _is_with_pandas():
        options["columns"] = None if columns is None else list(columns)
        if schema is not None:
            options["schema"] = schema
        return _read_with_pandas("parquet", file_path, options)
    reader = active_spark_or_local().spark.read.options(**options)
    if schema is not None:
        reader = reader.schema(schema)
    paths = paths_for_spark(file_path)
    for path in paths:
        _refuse_empty_files(path)
    frame = reader.parquet(*paths)
    if schema is None and frame.columns:
        # Partition columns (column=value folders), for which Spark infers 32-bit integers.
        files = frame.inputFiles()[:1]
        keys = {*re.findall(r"/([^/=]+)=[^/]*(?=/)", unquote("".join(files)))}
        wide = _wide(frame.select(*[quoted(name) for name in frame.columns if name in keys]).schema)
        frame = frame.withColumns(
            {each.name: F.col(quoted(each.name)).cast(each.dataType) for each in wide.fields}
        )
    if columns is not None:
        find_columns(columns, frame.columns, f"The input {file_path}")
        frame = frame.select(*map(quoted, columns))
    return to_xshards(frame)


def _refuse_empty_files(path: str) -> None:
    """Raise UsageError for an empty local file, because Spark's message is hard to read."""
    if not is_local_path(path) or not exists(path):
        return
    for file in files_of(path, nested=True):
        if os.path.getsize(open_file_system(file)[1]) == 0:
            raise UsageError(
                f"{file} is empty, so it is not a Parquet file; remove it or write it again",
                code="file-damaged",
                path=file,
            )


def _read_lake(
    path: str | Sequence[str], columns: Sequence[str] | None
) -> SparkXShards | RayXShards:
    """Read a lake table in Spark or Ray tasks, as XShards with one frame per partition."""
    from bigdl.orca.data.lake_tables import frames

    table = open_table(path)
    if columns is not None:
        find_columns(columns, table.schema.names, f"The input {table.name}")
    if not is_alone():
        return to_xshards(frames.spark_frame(table, active_spark_or_local().spark, columns))
    import ray

    cluster: Any = active_cluster()
    read, groups = frames.parts(table, cluster.nodes * cluster.cores_per_node, columns)
    task: Any = ray.remote(lambda ranges: [read(ranges).to_pandas()])
    return RayXShards([task.remote(ranges) for ranges in groups])


def _is_with_pandas() -> bool:
    return OrcaContext.pandas_read_backend == "pandas" or is_alone()


def to_xshards(frame, names=None, finish=None, class_name=DATA_FRAME):
    """Convert a Spark frame to XShards, one shard per partition, and apply `finish` to each shard.

    `finish` is applied to each shard; there is at least one partition per node.
    """
    rdd = frames_of(frame, names=names)
    if finish is not None:
        rdd = capture_failures(rdd.map(finish))
    nodes = active_spark_or_local().nodes
    shards = process_spark_xshards(SparkXShards.lazy(rdd, class_name), nodes)
    return SparkXShards(shards.rdd, class_name=shards.type.get("class_name"))


# NumPy's ``dtype.kind`` of dtypes that Spark parses; pandas converts the other dtypes from strings.
_NUMBERS = "biuf"

# Options of Spark's CSV and file readers, in lower case; Spark ignores unknown options.
_CSV_OPTIONS = """
charset chartoescapequoteescaping columnnameofcorruptrecord compression codec dateformat
delimiter emptyvalue enabledatetimeparsingfallback encoding enforceschema escape escapequotes
extension header ignorecorruptfiles ignoreleadingwhitespace ignoremissingfiles
ignoretrailingwhitespace inferschema inputbuffersize linesep locale maxcharspercolumn maxcolumns
mode modifiedafter modifiedbefore multiline nanvalue negativeinf nullvalue pathglobfilter
positiveinf preferdate quote quoteall recursivefilelookup samplingratio singlevariantcolumn
timestampformat timestampntzformat timezone unescapedquotehandling
"""


_RAGGED = "_bigdl_ragged"  # column with the rows whose number of fields differs
_SHOWN = 200  # maximum characters of a row in a message


def _read_csv(
    file_path: str | Sequence[str],
    header: str | int | None = "infer",
    names: Sequence[str] | str | None = None,
    index_col: str | int | None = None,
    usecols: Sequence | Callable | None = None,
    dtype: object = None,
    squeeze: bool = False,
    sep: str = ",",
    quotechar: str | None = None,
    escapechar: str | None = None,
    comment: str | None = None,
    mangle_dupe_cols: bool = True,
    parse_dates: bool = False,
    **options: Any,
):
    """Read CSV files with Spark; see :func:`read_csv`."""
    from pandas.api.types import pandas_dtype
    from pyspark.sql.types import StringType, StructField, StructType

    if mangle_dupe_cols is not True:
        raise UsageError(
            f"mangle_dupe_cols can only be True, got {mangle_dupe_cols!r}",
            code="argument-value",
            argument="mangle_dupe_cols",
            allowed=[True],
        )
    if parse_dates is not False:
        raise UsageError(
            f"parse_dates can only be False, got {parse_dates!r}; Spark recognizes dates without "
            "it",
            code="argument-value",
            argument="parse_dates",
            allowed=[False],
        )
    known = _CSV_OPTIONS.split()
    unknown = [name for name in options if name.lower() not in known]
    if unknown:
        raise UsageError(
            f"read_csv with Spark has no option {', '.join(map(repr, unknown))}; set "
            'OrcaContext.pandas_read_backend = "pandas" for all options of pandas.read_csv',
            code="argument-unknown",
        )
    if header == "infer":
        header = 0 if names is None else None
    if header is not None and (isinstance(header, bool) or header != 0):
        raise UsageError(
            f"Unknown header argument {header!r}; it can be 'infer', 0 or None",
            code="argument-value",
            argument="header",
            allowed=["infer", 0, None],
        )
    if comment is not None and (not isinstance(comment, str) or len(comment) != 1):
        raise UsageError(
            f"Only length-1 comment characters supported, got {comment!r}",
            code="argument-value",
            argument="comment",
        )

    _translate_encoding(options)
    lowered = {name.lower(): value for name, value in options.items()}
    reader = active_spark_or_local().spark.read.options(
        header=header == 0,
        sep=sep,
        preferDate=False,  # dates become datetime64, not Python objects
        columnPruning=False,  # the check of rows needs all fields
        # A quote within quotes is doubled, unless an escape character is set.
        escape='"' if quotechar is None else quotechar,
    )
    for key, value in (("quote", quotechar), ("escape", escapechar), ("comment", comment)):
        if value is not None:
            reader = reader.option(key, value)
    paths = paths_for_spark(file_path)
    reader = reader.options(**{"inferSchema": True, **options})

    headers: dict[tuple[str, ...], list[str]] | None = None

    def load(reader: DataFrameReader, schema: StructType) -> DataFrame:
        if headers is not None and len(headers) > 1:
            return _load_by_names(headers, reader, schema)
        return reader.schema(schema).csv(paths)

    if isinstance(names, str):
        schema = cast("StructType", data_type(names))
        columns = schema.names
    else:
        frame = reader.csv(paths)
        if not frame.columns:
            if names is None:
                raise UsageError(
                    f"No columns to parse from file: {file_path} is empty",
                    code="data-empty",
                    path=file_path,
                )
            empty = [StructField(name, StringType()) for name in safe_names(len(names))]
            frame = reader.schema(StructType(empty)).csv(paths)
        schema = _wide(frame.schema)
        files = sorted(frame.inputFiles()) if header == 0 else []
        if len(files) > 1:
            if comment is None:
                quote = lowered.get("quote", '"' if quotechar is None else quotechar)
                charset = lowered.get("encoding", lowered.get("charset"))
                headers = _headers_of(files, lowered.get("delimiter", sep), quote, charset)
            if headers is not None and len(headers) > 1:
                schema = _schema_by_names(reader, headers)
            elif headers is None:
                # Spark then checks each header, so columns in another order are not mixed up.
                reader = reader.options(enforceSchema=False, **options)
        columns = _column_names(names, schema.names, header, usecols)
    if len(set(columns)) != len(columns):
        raise UsageError(
            f"Found duplicate names in {columns}; column names must be unique",
            code="column-duplicate",
            columns=columns,
        )
    selected = _selected_columns(usecols, columns, names is not None)
    index = _index(index_col, selected)

    types = {
        name: each for name, each in _dtypes_by_name(dtype, columns).items() if name in selected
    }
    text_columns = [name for name, each in types.items() if pandas_dtype(each).kind not in _NUMBERS]
    if text_columns and not isinstance(names, str):
        fields = [
            StructField(field.name, StringType()) if name in text_columns else field
            for name, field in zip(columns, schema.fields, strict=True)
        ]
        schema = StructType(fields)
    safe = dict(zip(columns, safe_names(len(columns)), strict=True))
    kept = [safe[name] for name in selected]
    is_checked = lowered.get("mode", "permissive").lower() == "permissive" and not (
        lowered.keys() & {"columnnameofcorruptrecord", "singlevariantcolumn"}
        or "_corrupt_record" in columns
    )
    if is_checked:
        # Otherwise Spark silently drops the excess fields
        reader = reader.option("columnNameOfCorruptRecord", _RAGGED)
        frame = load(reader, StructType([*schema.fields, StructField(_RAGGED, StringType())]))
        frame = frame.toDF(*safe.values(), _RAGGED)
        where = F.concat_ws("\n", F.input_file_name(), _RAGGED)
        frame = frame.select(*kept, F.when(F.col(_RAGGED).isNotNull(), where).alias(_RAGGED))
        selected.append(_RAGGED)
    else:
        frame = load(reader, schema).toDF(*safe.values()).select(*kept)
    check_row = partial(
        _check_row,
        len(columns),
        lowered.get("delimiter", sep),
        lowered.get("quote", '"' if quotechar is None else quotechar),
        lowered.get("escape", escapechar),
    )

    def finish(frame: pd.DataFrame) -> pd.DataFrame | pd.Series:
        if is_checked:
            frame.pop(_RAGGED).dropna().map(check_row)
        frame = _cast(frame, types) if types else frame
        if index is not None:
            frame = frame.set_index(index)
        return cast("pd.Series", frame.squeeze("columns")) if squeeze else frame

    return to_xshards(frame, selected, finish, None if squeeze else DATA_FRAME)


def _read_json(
    file_path: str | Sequence[str],
    names: Sequence[str] | None = None,
    usecols: Sequence | Callable | None = None,
    dtype: object = None,
    index_col: str | int | None = None,
    squeeze: bool = False,
    lines: bool | None = None,
    orient: str = "records",
    **options: Any,
):
    """Read JSON files with Spark; see :func:`read_json`."""
    if lines is not None:  # pandas' name of the option
        options["multiLine"] = not lines
    if orient != "records":
        raise UsageError(
            'Spark reads JSON of orient="records" only; set OrcaContext.pandas_read_backend = '
            '"pandas" for other values',
            code="unsupported",
            argument="orient",
        )
    _translate_encoding(options)
    lowered = {name.lower() for name in options}
    if lowered & {"encoding", "charset"} and not lowered & {"multiline", "linesep"}:
        options["lineSep"] = "\n"  # Spark requires it with any charset except UTF-8
    frame = active_spark_or_local().spark.read.json(paths_for_spark(file_path), **options)
    if not frame.columns:
        raise UsageError(
            f"{file_path} has no records: its files are empty",
            code="data-empty",
            path=file_path,
        )
    order = _order_of_keys(frame, options)
    frame = frame.select(*map(quoted, order))
    columns = _column_names(names, order, 0, usecols)
    if len(set(columns)) != len(columns):
        raise UsageError(
            f"Found duplicate names in {columns}; column names must be unique",
            code="column-duplicate",
            columns=columns,
        )
    selected = _selected_columns(usecols, columns, names is not None)
    index = _index(index_col, selected)
    types = {
        name: each for name, each in _dtypes_by_name(dtype, columns).items() if name in selected
    }
    safe = dict(zip(columns, safe_names(len(columns)), strict=True))
    frame = frame.toDF(*safe.values()).select(*[safe[name] for name in selected])

    def finish(frame: pd.DataFrame) -> pd.DataFrame | pd.Series:
        frame = _cast(frame, types) if types else frame
        if index is not None:
            frame = frame.set_index(index)
        return cast("pd.Series", frame.squeeze("columns")) if squeeze else frame

    return to_xshards(frame, selected, finish, None if squeeze else DATA_FRAME)


def _cast(frame: pd.DataFrame, types: dict[str, Any]) -> pd.DataFrame:
    """Cast columns of a frame; nulls stay null."""
    from pandas.api.types import pandas_dtype

    text_columns = [name for name, each in types.items() if pandas_dtype(each).kind not in _NUMBERS]
    missing = frame[text_columns].isna()
    frame = frame.astype(types)
    for name in text_columns:  # pandas 2 converts null to "None"
        if missing[name].any():
            frame[name] = frame[name].mask(missing[name])
    return frame


def _order_of_keys(frame: DataFrame, options: dict[str, Any]) -> list[str]:
    """Return the columns in the key order of the first record; Spark sorts them by name."""
    import json

    is_lines = str(options.get("multiLine", False)).lower() != "true"
    keys: list[str] = []
    if is_lines:
        first = frame.sparkSession.read.text(frame.inputFiles()).filter("trim(value) <> ''").first()
        with contextlib.suppress(ValueError):  # Spark reports the error
            record = json.loads(first[0]) if first is not None else {}
            keys = [key for key in record if key in frame.columns]
    return keys + [name for name in frame.columns if name not in keys]


# Charsets of Spark's readers, by Python's names.
_CHARSETS = {
    "utf-8": "UTF-8",
    "utf-8-sig": "UTF-8",  # Spark drops a byte order mark
    "ascii": "US-ASCII",
    "iso8859-1": "ISO-8859-1",
    "utf-16": "UTF-16",
    "utf-16-be": "UTF-16BE",
    "utf-16-le": "UTF-16LE",
    "utf-32": "UTF-32",
}


def _translate_encoding(options: dict[str, Any]) -> None:
    """Replace an encoding with Spark's name for it, or raise UsageError if Spark lacks it."""
    for key in [name for name in options if name.lower() in ("encoding", "charset")]:
        encoding = options[key]
        if encoding is None:
            del options[key]
            continue
        try:
            known = codecs.lookup(str(encoding)).name
        except LookupError:
            raise UsageError(
                f"Unknown encoding {encoding!r}; pass a name such as utf-8 or latin-1",
                code="argument-value",
                argument="encoding",
            ) from None
        # Without lineSep or multiLine, Spark searches line ends byte by byte.
        is_wide = known.startswith(("utf-16", "utf-32"))
        splits_bytes = not {name.lower() for name in options} & {"multiline", "linesep"}
        if known not in _CHARSETS or (is_wide and splits_bytes):
            raise UsageError(
                f"Spark does not support the encoding {encoding!r}, only utf-8, utf-8-sig, ascii "
                "and latin-1; set "
                'OrcaContext.pandas_read_backend = "pandas" for other encodings',
                code="unsupported",
                argument="encoding",
            )
        options[key] = _CHARSETS[known]


def _headers_of(
    files: Sequence[str], sep: str, quote: str, encoding: str | None
) -> dict[tuple[str, ...], list[str]] | None:
    """Group non-empty files by header; return None if a header is unreadable."""
    import csv

    def header(file: str) -> tuple[str, ...]:
        import fsspec

        system, path = open_file_system(unquote(file))
        with (
            system.open(path, "rb") as raw,
            fsspec.utils.compr[fsspec.utils.infer_compression(path)](raw, mode="rb")
            if fsspec.utils.infer_compression(path)
            else contextlib.nullcontext(raw) as data,
        ):
            first = data.readline(_HEADER_BYTES)
        text = first.decode(encoding or "utf-8").removeprefix("\ufeff").rstrip("\r\n")
        if quote and text.count(quote) % 2:
            raise ValueError(f"the header of {file} has more than one line")
        if len(sep) == 1 and len(quote) == 1:
            return tuple(next(csv.reader([text], delimiter=sep, quotechar=quote), ()))
        return tuple(text.split(sep)) if text else ()

    headers: dict[tuple[str, ...], list[str]] = {}
    try:
        with ThreadPoolExecutor(16) as pool:
            for file, names in zip(files, pool.map(header, files), strict=True):
                headers.setdefault(names, []).append(file)
    except (
        Exception
    ) as error:  # storage, compression or charset errors: Spark then compares the headers
        logger.debug("Cannot compare the headers of %d files: %s", len(files), error)
        return None
    headers.pop((), None)
    return headers


def _schema_by_names(
    reader: DataFrameReader, headers: dict[tuple[str, ...], list[str]]
) -> StructType:
    """Return one schema for files that have the same columns in different orders.

    Raises
    ------
    UsageError
        If a file has other columns than the first.
    """
    from pyspark.sql.types import DoubleType, StringType, StructField, StructType

    first, *others = headers
    for names in others:
        if sorted(names) != sorted(first):
            missing, more = sorted({*first} - {*names}), sorted({*names} - {*first})
            differences = [f"lacks {missing}"] * bool(missing) + [f"also has {more}"] * bool(more)
            raise UsageError(
                f"The header of {headers[names][0]} is {list(names)}, and that of "
                f"{headers[first][0]} is {list(first)}: it "
                f"{' and '.join(differences) or 'differs'}; "
                "use the same columns in all files, or set "
                'OrcaContext.pandas_read_backend = "pandas", which fills in nulls',
                code="data-schema",
                path=headers[names][0],
                columns=list(names),
            )
    types: dict[str, list[Any]] = {}
    for files in headers.values():
        for field in _wide(reader.csv(files).schema):
            if field.dataType not in types.setdefault(field.name, []):
                types[field.name].append(field.dataType)
    numbers = {"bigint", "double"}
    fields = []
    for name in [
        *first,
        *(name for name in types if name not in first),
    ]:  # including partition columns
        single = types[name][0] if len(types[name]) == 1 else None
        are_numbers = {each.simpleString() for each in types[name]} <= numbers
        field_type = single or (DoubleType() if are_numbers else StringType())
        fields.append(StructField(name, field_type))
    return StructType(fields)


def _load_by_names(
    headers: dict[tuple[str, ...], list[str]], reader: DataFrameReader, schema: StructType
):
    """Read files that have the same columns in different orders into one frame, matched by name."""
    from pyspark.sql.types import StructType

    frames = []
    for names, files in headers.items():
        positions = {name: index for index, name in enumerate(names)}
        # Partition columns and the column of ragged rows are in no header and stay last.
        fields = sorted(schema.fields, key=lambda each: positions.get(each.name, len(positions)))
        frame = reader.schema(StructType(fields)).csv(files)
        frames.append(frame.select(*map(quoted, schema.names)))
    return functools.reduce(lambda one, other: one.unionByName(other), frames)


def _wide(schema: StructType) -> StructType:
    """Replace inferred 32-bit integers in a schema with 64-bit integers, as in pandas."""
    from pyspark.sql.types import IntegerType, LongType, StructField, StructType

    return StructType(
        [
            StructField(each.name, LongType()) if isinstance(each.dataType, IntegerType) else each
            for each in schema.fields
        ]
    )


def _check_row(columns: int, sep: str, quote: str, escape: str | None, row: str) -> None:
    """Raise UsageError for a row with too many fields or an unclosed quote.

    Parameters
    ----------
    columns : int
        Number of columns.
    sep, quote, escape : str
        Characters of the CSV format.
    row : str
        File name and row, separated by a line break.
    """
    import csv

    file, _, text = row.partition("\n")
    shown = repr(text if len(text) < _SHOWN else f"{text[:_SHOWN]}…")
    if quote and (text.replace(escape + quote, "") if escape else text).count(quote) % 2:
        raise UsageError(
            f"A row of {file} ends within quotes: {shown}; pass multiLine=True if fields contain "
            'line breaks, or quotechar="" if quotes are ordinary characters',
            code="file-damaged",
            path=file,
        )
    fields = text.split(sep)
    if len(sep) == len(quote) == 1:
        lines = io.StringIO(text, newline="")
        fields = next(csv.reader(lines, delimiter=sep, quotechar=quote, escapechar=escape), [])
    if any(fields[columns:]):
        raise UsageError(
            f"A row of {file} has {len(fields)} fields, but there are {columns} columns: {shown}; "
            'correct it, or pass mode="DROPMALFORMED" to drop all malformed rows',
            code="data-shape",
            path=file,
        )


def _column_names(
    names: Sequence[str] | None, columns: list[str], header: int | None, usecols: Any
) -> list[str]:
    """Return the names of all columns; `names` may cover only the indices in `usecols`."""
    if names is None:
        return list(columns) if header == 0 else [str(i) for i in range(len(columns))]
    names = list(names)
    if len(names) == len(columns):
        return names
    is_numbers = isinstance(usecols, Sequence) and all(isinstance(each, int) for each in usecols)
    numbers = sorted(set(usecols)) if is_numbers else []
    if len(names) == len(numbers) and set(numbers) <= set(range(len(columns))):
        names_by_index = dict(zip(numbers, names, strict=True))
        return [names_by_index.get(number, f"column {number}") for number in range(len(columns))]
    raise UsageError(
        f"The number of names {names} does not match the number of columns, {len(columns)}; "
        "pass a name for each, or for each number in usecols",
        code="argument-value",
        argument="names",
    )


def _selected_columns(usecols, names: list[str], are_given: bool) -> list[str]:
    """Return the names of the columns that `usecols` selects, in the order of the file."""
    if usecols is None or callable(usecols):
        return [name for name in names if usecols is None or usecols(name)]
    requested: list[Any] = [usecols] if isinstance(usecols, str) else list(usecols)
    columns: Sequence[Any] = names
    if all(isinstance(each, int) for each in requested):
        columns = range(len(names))
    elif not all(isinstance(each, str) for each in requested):
        raise UsageError(
            "usecols must be column names, column indices, or a function of a name, got "
            f"{usecols!r}",
            code="argument-type",
            argument="usecols",
        )
    missing = [each for each in requested if each not in columns]
    if missing:
        if are_given:
            raise UsageError(
                f"Passed names did not match usecols: {missing} of {names}",
                code="column-missing",
                argument="usecols",
                column=missing[0],
                columns=names,
            )
        raise UsageError(
            f"usecols do not match columns, columns expected but not found: {missing}, of {names}",
            code="column-missing",
            argument="usecols",
            column=missing[0],
            columns=names,
        )
    return [name for name, column in zip(names, columns, strict=True) if column in requested]


def _index(index_col, names: list[str]) -> str | None:
    if index_col is None or index_col is False:
        return None
    is_number = isinstance(index_col, int) and not isinstance(index_col, bool)
    if is_number and 0 <= index_col < len(names):
        return names[index_col]
    if isinstance(index_col, str) and index_col in names:
        return index_col
    raise UsageError(
        f"The column index to be set type is not in current dataframe: {index_col!r}, "
        f"not in {names}",
        code="column-missing",
        argument="index_col",
        column=index_col,
        columns=names,
    )


def _dtypes_by_name(dtype, names: list[str]) -> dict[str, Any]:
    """Return the dtype of each column by name."""
    if not isinstance(dtype, dict):
        return {} if dtype is None else dict.fromkeys(names, dtype)
    types = {}
    for key, each in dtype.items():
        if key not in names:
            if isinstance(key, bool) or key not in range(len(names)):
                raise UsageError(
                    f"dtype has the column {key!r}, which is not in {names}",
                    code="column-missing",
                    argument="dtype",
                    column=key,
                    columns=names,
                )
            key = names[key]
        types[key] = each
    return types


def _read_with_pandas(format: str, file_path, options: dict[str, Any]):
    """Read files with ``pandas.read_<format>``, concatenated to one frame per partition."""
    files = [
        file
        for path in split_paths(file_path)
        for file in files_of(path, nested=format == "parquet")
    ]
    cluster: Any = active_cluster()
    number = min(len(files), cluster.nodes * cluster.cores_per_node)
    groups = [files[low:high] for low, high in split_evenly(len(files), number)]
    for option in ("iterator", "chunksize"):
        if options.get(option):
            raise UsageError(
                f"{option} is not supported: every shard is a complete frame",
                code="unsupported",
                argument=option,
            )

    def read(files: list[str]) -> pd.DataFrame | pd.Series:
        import pandas as pd

        keywords = dict(options)
        squeeze = keywords.pop("squeeze", False)  # removed in pandas 2
        frames = []
        for file in files:
            if not is_local_path(file):
                open_file_system(file)  # initializes the storage driver in this process
            with as_usage_error(
                f"{file} cannot be read", text=first_line, code="file-format", path=file
            ):
                frame = getattr(pd, f"read_{format}")(file, **keywords)
            frames.append(frame.squeeze("columns") if squeeze else frame)
        return frames[0] if len(frames) == 1 else pd.concat(frames)

    if is_alone():
        import ray

        task: Any = ray.remote(lambda files: [read(files)])
        return RayXShards([task.remote(files) for files in groups])
    rdd = capture_failures(parallelize(groups, number).map(read))
    return SparkXShards(rdd, class_name=None if options.get("squeeze") else DATA_FRAME)
