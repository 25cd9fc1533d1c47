"""Boosted trees of a server: files of XGBoost and LightGBM."""

from __future__ import annotations

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.texts import as_strings
from bigdl.nano.acceleration.tree_network import fastest_trees
from bigdl.nano.acceleration.trees import Trees, matrix_of, missing_of, read_trees
from bigdl.nano.serving.signature import Signature, TensorSpec

TREE_FILES = ("model.ubj", "model.json", "model.txt")
"""Files with trees in a model's folder: those of XGBoost, and of LightGBM."""

_TRIAL_ROWS = 16
_FLOAT = np.dtype("float32")


class ServedTrees:
    """Boosted trees that are called with one array per feature.

    The inputs are the feature columns of the fit, in their order: numbers, or texts of categorical
    features. Trees that another program saved, or that were fitted on arrays, have one input ``x``
    with all features, if their features have no names.

    Parameters
    ----------
    data : bytes
        Content of the file.
    threads : int, optional
        Threads of one call; default all.
    is_fastest : bool
        Whether to measure which runtime is faster.

    Attributes
    ----------
    trees : Trees
    signature : Signature
    """

    def __init__(self, data: bytes, threads: int | None = None, *, is_fastest: bool = False):
        self.trees = read_trees(data, threads or 0)
        facts = self.trees.read_facts()
        self._missing = missing_of(facts)
        if is_fastest:
            self.trees = fastest_trees(self.trees, _TRIAL_ROWS, self._missing)
        texts = facts.get("categories") or {}
        features, widths = facts.get("features"), facts.get("widths")
        if features is None:  # arrays, or another program
            features, widths = _plain_names(self.trees), None
        widths = widths or [1] * len(features)
        if features and sum(widths) != self.trees.width:
            raise UsageError(
                f"The trees have {self.trees.width} features, but name {len(features)} columns; "
                "save them again with this version of BigDL",
                code="file-format",
            )
        self._categories = {i: texts[name] for i, name in enumerate(features) if name in texts}
        inputs = [
            TensorSpec(
                name,
                np.dtype(object) if name in texts else _FLOAT,
                (-1,) if width == 1 else (-1, width),
            )
            for name, width in zip(features, widths, strict=True)
        ] or [TensorSpec("x", _FLOAT, (-1, self.trees.width))]
        result = self.trees.predict(np.zeros((1, self.trees.width), np.float32))
        output = TensorSpec("prediction", result.dtype, (-1, *result.shape[1:]))
        self.signature = Signature(tuple(inputs), (output,))

    def run(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Return the predictions of rows."""
        columns = [
            _encoded(each, spec.name) if spec.dtype == object else each
            for each, spec in zip(arrays, self.signature.inputs, strict=True)
        ]
        block = matrix_of(columns, self._categories, self.trees.width)
        return [self.trees.predict(block, missing=self._missing)]


def is_tree_file(suffix: str) -> bool:
    """Return True for suffixes of files with trees."""
    return suffix in {f".{name.rpartition('.')[2]}" for name in TREE_FILES}


def _plain_names(trees: Trees) -> list[str]:
    """Return the names of the features, if they are not those that a library makes up."""
    names = trees.names
    return [] if names == [f"Column_{index}" for index in range(len(names))] else names


def _encoded(texts: np.ndarray, name: str) -> np.ndarray:
    return np.char.encode(as_strings(texts, name).astype(np.str_), "utf-8")
