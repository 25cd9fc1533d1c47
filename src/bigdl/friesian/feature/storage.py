"""Saving and loading of pipelines: ``pipeline.json`` and a Parquet file per state table."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.parquet as pq

from bigdl.common.errors import UsageError
from bigdl.friesian.ops.column_types import Field, Schema
from bigdl.friesian.ops.operator import OPERATORS, FittedOperator, Operator
from bigdl.orca.data.file import open_file_system

if TYPE_CHECKING:
    import numpy as np

_FORMAT = "bigdl.friesian.FeaturePipeline"
_VERSION = 1
_FILE = "pipeline.json"
_TABLE = "__bigdl_table__"  # JSON key of a table's file name


def save(
    path: str, steps: Sequence[Operator], schema: Schema, fitted: Sequence[FittedOperator] | None
) -> None:
    """Write a pipeline to a folder; replace a pipeline that exists there."""
    fs, folder = open_file_system(path)
    if fs.exists(folder):
        if fs.find(folder) and not fs.exists(f"{folder}/{_FILE}"):
            raise UsageError(
                f"{path} exists and does not contain a pipeline; choose another folder",
                code="path-exists",
                path=str(path),
            )
        fs.rm(folder, recursive=True)
    fs.makedirs(folder, exist_ok=True)
    numbers = count()

    def plain(value: pa.Table | Field | np.generic) -> object:
        if isinstance(value, pa.Table):
            name = f"state-{next(numbers):03d}.parquet"
            pq.write_table(value, f"{folder}/{name}", filesystem=fs)
            return {_TABLE: name}
        return vars(value) if isinstance(value, Field) else value.item()  # a NumPy number

    content = {
        "format": _FORMAT,
        "version": _VERSION,
        "schema": dict(schema),
        "steps": [{"method": step.method, "arguments": vars(step)} for step in steps],
        "states": None if fitted is None else [each.state for each in fitted],
    }
    with fs.open(f"{folder}/{_FILE}", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False, default=plain)


def load(path: str) -> tuple[list[Operator], dict[str, Field], list[FittedOperator] | None]:
    """Read the operators, the data schema and the fitted operators of a saved pipeline."""
    fs, folder = open_file_system(path)

    def with_tables(value: dict[str, Any]) -> dict[str, Any] | pa.Table:
        if list(value) != [_TABLE]:
            return value
        # Arrow threads may hold the Python file slightly longer; a process that exits at that
        # moment aborts.
        path = f"{folder}/{value[_TABLE]}"
        with pq.ParquetFile(path, filesystem=fs, pre_buffer=False) as file:
            return file.read(use_threads=False)

    if not fs.exists(f"{folder}/{_FILE}"):
        raise UsageError(
            f"There is no pipeline at {path}: {_FILE} is missing",
            code="path-missing",
            path=str(path),
        )
    try:
        content = json.loads(fs.cat_file(f"{folder}/{_FILE}"), object_hook=with_tables)
    except ValueError as error:
        raise UsageError(
            f"The pipeline at {path} cannot be read: {error}", code="file-damaged", path=str(path)
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UsageError(
            f"{path}/{_FILE} does not describe a pipeline", code="file-format", path=str(path)
        )
    if content.get("version") != _VERSION:
        raise UsageError(
            f"The pipeline at {path} has the version {content.get('version')!r}, but this BigDL "
            f"reads version {_VERSION}; save it again with the BigDL that wrote it, or update "
            "BigDL",
            code="version-unsupported",
            path=str(path),
        )
    steps = [_operator(path, each["method"], each["arguments"]) for each in content["steps"]]
    schema = {name: Field(**each) for name, each in content["schema"].items()}
    if content["states"] is None:
        return steps, schema, None
    fitted: list[FittedOperator] = []
    before: Mapping[str, Field] = schema
    for step, state in zip(steps, content["states"], strict=True):
        fitted.append(FittedOperator(step, before, state))
        before = fitted[-1].after
    return steps, schema, fitted


def _operator(path: str, method: str, arguments: Mapping[str, Any]) -> Operator:
    operator = OPERATORS.get(method)
    if operator is None:
        raise UsageError(
            f"The pipeline at {path} has an unknown step {method!r}; import or install the "
            "package that registers it",
            code="name-unknown",
            method=method,
            path=str(path),
        )
    return operator(**arguments)
