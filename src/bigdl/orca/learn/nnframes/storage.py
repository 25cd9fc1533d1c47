"""Saved stages: Spark ML's metadata, and beside it the weights and what describes the model.

A saved stage is a folder on any file system that Spark reads::

    metadata/     class, uid and params, as every stage of Spark ML has
    torch/        Parquet: name, number, piece    ("model.pt", "parts.pkl")

The weights load with ``weights_only=True``.  The model itself is Python code: it is a pickle, which
can run any code, so it is read only where this process wrote it or where the user says so.
"""

from __future__ import annotations

import contextlib
import contextvars
import hashlib
from collections.abc import Iterator
from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReader, MLWriter

from bigdl.common.errors import UsageError

__all__ = ["StageReader", "StageWriter", "trusted_loading"]

_PIECE = 16 << 20
_own: set[str] = set()  # digests of the pickles that this process wrote
_trusts = contextvars.ContextVar("trusts", default=False)


@contextlib.contextmanager
def trusted_loading() -> Iterator[None]:
    """A context in which saved stages load whoever wrote them.

    For ``PipelineModel.load`` and its like, which have no ``trust=``: loading a model that somebody
    saved runs that person's code.
    """
    token = _trusts.set(True)
    try:
        yield
    finally:
        _trusts.reset(token)


class StageWriter(MLWriter):
    """Writes a stage whose ``_files()`` gives the content of its files by name."""

    def __init__(self, stage):
        super().__init__()
        self._stage = stage

    def saveImpl(self, path: str) -> None:
        import pyarrow as pa

        files = self._stage._files()
        DefaultParamsWriter.saveMetadata(self._stage, path, self.sparkSession)
        rows = [
            {"name": name, "number": number, "piece": data[start : start + _PIECE]}
            for name, data in files.items()
            for number, start in enumerate(range(0, max(1, len(data)), _PIECE))
        ]
        schema = pa.schema([("name", pa.string()), ("number", pa.int32()), ("piece", pa.binary())])
        frame = self.sparkSession.createDataFrame(pa.Table.from_pylist(rows, schema))
        frame.coalesce(1).write.parquet(f"{path}/torch")
        _own.update(_digest(data) for name, data in files.items() if name.endswith(".pkl"))


class StageReader(MLReader):
    """Reads a stage; its class makes itself of the files with ``_from_files``."""

    def __init__(self, cls, trust: bool = False):
        super().__init__()
        self._cls = cls
        self._trust = trust

    def load(self, path: str):
        metadata = DefaultParamsReader.loadMetadata(path, self.sparkSession)
        expected = f"{self._cls.__module__}.{self._cls.__name__}"
        if metadata["class"] != expected:
            raise UsageError(
                f"{path!r} holds a {metadata['class']}, not a {self._cls.__name__}; load it with "
                "its own class"
            )
        stage = self._cls._from_files(self._files(path), lambda data: self._loaded(path, data))
        stage._resetUid(metadata["uid"])
        DefaultParamsReader.getAndSetParams(stage, metadata)
        return stage

    def _files(self, path) -> dict[str, bytes]:
        pieces: dict[str, list] = {}
        frame = self.sparkSession.read.parquet(f"{path}/torch").orderBy("name", "number")
        for row in frame.collect():
            pieces.setdefault(row["name"], []).append(bytes(row["piece"]))
        return {name: b"".join(found) for name, found in pieces.items()}

    def _loaded(self, path, data) -> Any:
        """What a pickle of the folder holds, if it may be read."""
        import cloudpickle

        if not (self._trust or _trusts.get() or _digest(data) in _own):
            raise UsageError(
                f"{path!r} holds a pickled model, and loading it can run any code; if you know "
                "where it comes from, pass trust=True, or load a pipeline inside "
                "`with trusted_loading():`"
            )
        try:
            return cloudpickle.loads(data)
        except Exception as error:  # whatever the code in it raises
            raise UsageError(f"The model in {path!r} cannot be loaded: {error}") from error


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
