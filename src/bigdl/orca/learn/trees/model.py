"""Boosted trees that prediction tasks load, and what their files contain."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.common.storage import file_exists, joined, read_bytes, write_bytes
from bigdl.nano.acceleration.tree_network import fastest_trees
from bigdl.nano.acceleration.trees import Trees, matrix_of, read_trees

_CHECKPOINT = "checkpoint"
_CHECKPOINT_FIELDS = ("history", "first", "is_complete", "settings", "stop_at", "stopping")
_CHECKPOINT_FILES = {"xgboost": "checkpoint.ubj", "lightgbm": "checkpoint.txt"}


@dataclass(frozen=True)
class TreeCheckpoint:
    """State of a fit after some rounds.

    Attributes
    ----------
    model : bytes
        The trees in the format of their library.
    history : list of dict
        Metrics of the rounds.
    first : int
        Number of rounds of the model before the fit.
    is_complete : bool
        Whether the fit has ended.
    settings : str
        Parameters and columns of the fit.
    stop_at : int or None
        Number of rounds at which the fit ends; None in checkpoints that lack it.
    stopping : list or None
        `early_stopping_rounds` and `maximize`; None without early stopping.
    """

    model: bytes
    history: list[dict[str, float]]
    first: int
    is_complete: bool
    settings: str
    stop_at: int | None = None
    stopping: list[int | bool | None] | None = None

    def write(self, folder: str) -> None:
        """Write the checkpoint in one file, which replaces the previous one."""
        trees = read_trees(self.model)
        doc = {name: getattr(self, name) for name in _CHECKPOINT_FIELDS}
        data = trees.with_facts({**trees.read_facts(), _CHECKPOINT: doc})
        write_bytes(joined(folder, _CHECKPOINT_FILES[trees.library]), data)

    @classmethod
    def read(cls, folder: str, library: str) -> TreeCheckpoint | None:
        """Return the checkpoint of a library's trees in a folder; None if it has none.

        Raises
        ------
        UsageError
            If the file is no checkpoint.
        """
        path = joined(folder, _CHECKPOINT_FILES[library])
        if not file_exists(path):
            return None
        try:
            trees = read_trees(read_bytes(path))
            facts = trees.read_facts()
            doc = facts.pop(_CHECKPOINT)
        except (ValueError, KeyError) as error:
            raise UsageError(
                f"{path!r} is not a checkpoint of boosted trees; remove it, or fit without resume",
                code="file-format",
                path=path,
            ) from error
        return cls(trees.with_facts(facts), **doc)


@dataclass(frozen=True)
class TreeModel:
    """Picklable snapshot of boosted trees for prediction tasks.

    Attributes
    ----------
    data : bytes
        The trees in the format of their library.
    missing : float
    result : {"value", "margin", "leaf", "contributions"}
        Predictions, margins, leaf indices, or SHAP values.
    categories : dict of int to list of str
        Categories by the index of the text feature.
    has_margin : bool
        Whether the last column is the base margin.
    settings : dict
        Keyword arguments that create the Estimator again, without functions.
    trial_rows : int
        Number of rows with which the faster runtime is measured; 0 for that of the library.
    """

    data: bytes
    missing: float
    result: str
    categories: dict[int, list[str]]
    has_margin: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    trial_rows: int = 0

    def load_on(self, device: object) -> LoadedTrees:
        """Load the trees; `device` is ignored, since trees predict on the CPU."""
        import torch

        trees = read_trees(self.data, torch.get_num_threads())
        if self.trial_rows and self.result in ("value", "margin") and not self.has_margin:
            trees = fastest_trees(trees, self.trial_rows, self.missing)
        return LoadedTrees(self, trees)


class LoadedTrees:
    """Boosted trees that are called with a batch of numpy columns."""

    squeezes = False

    def __init__(self, model: TreeModel, trees: Trees):
        self._model, self._trees = model, trees

    @property
    def widths(self) -> list[int]:
        """Number of features, for arrays without a known length."""
        return [self._trees.width]

    def __call__(self, batch: list) -> np.ndarray:
        model, margin = self._model, None
        if model.has_margin:
            *batch, margin = batch
            margin = np.asarray(margin, np.float32)
        block = matrix_of(batch, model.categories, self._trees.width)
        return self._trees.predict(block, model.result, model.missing, margin)
