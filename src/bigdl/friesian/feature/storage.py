"""Pipelines in folders: ``pipeline.json``, and a Parquet file for each table of a state."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bigdl.common.errors import UsageError
from bigdl.friesian.ops.kinds import Field, Schema
from bigdl.friesian.ops.operator import OPERATORS, Fitted, Operator, State
from bigdl.orca.data.file import open_file_system

_FORMAT = "bigdl.friesian.FeaturePipeline"
_VERSION = 1
_FILE = "pipeline.json"


def save(
    path: str, steps: Sequence[Operator], schema: Schema, fitted: Sequence[Fitted] | None
) -> None:
    """Write a pipeline; what was in the folder goes."""
    fs, folder = open_file_system(path)
    folder = folder.rstrip("/")
    if fs.exists(folder):
        if fs.find(folder) and not fs.exists(f"{folder}/{_FILE}"):
            raise UsageError(f"{path} exists and is no pipeline; choose another folder")
        fs.rm(folder, recursive=True)
    fs.makedirs(folder, exist_ok=True)
    content: dict[str, Any] = {
        "format": _FORMAT,
        "version": _VERSION,
        "schema": {name: asdict(each) for name, each in schema.items()},
        "steps": [],
    }
    for place, step in enumerate(steps):
        each: dict[str, Any] = {"method": step.method, "arguments": vars(step)}
        if fitted is not None:
            each["state"] = _written(fs, folder, place, fitted[place].state)
        content["steps"].append(each)
    with fs.open(f"{folder}/{_FILE}", "w", encoding="utf-8") as file:
        json.dump(content, file, indent=1, ensure_ascii=False, default=np.generic.item)


def _written(fs: Any, folder: str, place: int, state: State) -> dict[str, Any]:
    """The state with names of files in the place of tables."""

    content: dict[str, Any] = {}
    for i, (name, value) in enumerate(state.items()):
        if not isinstance(value, pa.Table):
            content[name] = value
            continue
        file_name = f"state-{place:03d}-{i:03d}.parquet"
        with fs.open(f"{folder}/{file_name}", "wb") as file:
            pq.write_table(value, file)
        content[name] = {"file": file_name}
    return content


def load(path: str) -> tuple[list[Operator], dict[str, Field], list[Fitted] | None]:
    """Read what :func:`save` wrote: steps, fields of the data, and the steps with their states."""
    fs, folder = open_file_system(path)
    folder = folder.rstrip("/")
    try:
        with fs.open(f"{folder}/{_FILE}", encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError as error:
        raise UsageError(f"There is no pipeline at {path}: {_FILE} is missing") from error
    except ValueError as error:
        raise UsageError(f"The pipeline at {path} cannot be read: {error}") from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UsageError(f"{path}/{_FILE} is not that of a pipeline")
    if content.get("version") != _VERSION:
        raise UsageError(
            f"The pipeline at {path} has the version {content.get('version')!r}, but this BigDL "
            f"reads version {_VERSION}; save it anew with the BigDL that wrote it, or update BigDL"
        )
    steps = [_step(path, each) for each in content["steps"]]
    schema = {name: Field(**each) for name, each in content["schema"].items()}
    if not schema:
        return steps, schema, None
    fitted: list[Fitted] = []
    before: Mapping[str, Field] = schema
    for step, each in zip(steps, content["steps"], strict=True):
        fitted.append(Fitted(step, before, _read(fs, folder, each["state"])))
        before = fitted[-1].after
    return steps, schema, fitted


def _step(path: str, saved: dict[str, Any]) -> Operator:
    if saved["method"] not in OPERATORS:
        raise UsageError(f"The pipeline at {path} has a step {saved['method']!r}, unknown here")
    return OPERATORS[saved["method"]](**saved["arguments"])


def _read(fs: Any, folder: str, saved: dict[str, Any]) -> State:
    state = dict(saved)
    for name, value in saved.items():
        if isinstance(value, dict) and list(value) == ["file"]:
            # Read by threads of Arrow, the Python file may be held by one for a moment longer, and
            # a process that ends then aborts.
            with fs.open(f"{folder}/{value['file']}", "rb") as file:
                state[name] = pq.ParquetFile(file, pre_buffer=False).read(use_threads=False)
    return state
