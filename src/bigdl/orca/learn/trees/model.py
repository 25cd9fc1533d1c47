"""Boosted trees that prediction tasks load, and what their files contain."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.common.storage import file_exists, joined, read_bytes, write_bytes
from bigdl.orca.learn.trees.matrix import codes_of

if TYPE_CHECKING:
    import xgboost

_ATTRIBUTE = "bigdl"
_CHECKPOINT_ATTRIBUTE = "bigdl_checkpoint"
_CHECKPOINT_FIELDS = ("history", "first", "is_complete", "settings", "stop_at", "stopping")
_CHECKPOINT_FILE = "checkpoint.ubj"


def read_booster(data: bytes, threads: int = 0) -> xgboost.Booster:
    """Return the booster of a file's bytes; it uses `threads` threads (0: all)."""
    import xgboost

    booster = xgboost.Booster({"nthread": threads})
    booster.load_model(bytearray(data))
    return booster


def write_facts(booster: xgboost.Booster, facts: dict[str, Any]) -> None:
    """Store facts about the training in a booster, and thus in its file."""
    booster.set_attr(**{_ATTRIBUTE: json.dumps(facts)})


def read_facts(booster: xgboost.Booster) -> dict[str, Any]:
    """Return the facts of :func:`write_facts`; an empty dict for boosters of other programs."""
    text = booster.attr(_ATTRIBUTE)
    return json.loads(text) if text else {}


@dataclass(frozen=True)
class TreeCheckpoint:
    """State of a fit after some rounds.

    Attributes
    ----------
    model : bytes
        The booster in XGBoost's format.
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
        booster = read_booster(self.model)
        doc = {name: getattr(self, name) for name in _CHECKPOINT_FIELDS}
        booster.set_attr(**{_CHECKPOINT_ATTRIBUTE: json.dumps(doc)})
        write_bytes(joined(folder, _CHECKPOINT_FILE), bytes(booster.save_raw("ubj")))

    @classmethod
    def read(cls, folder: str) -> TreeCheckpoint | None:
        """Return the checkpoint in a folder; None if it has none.

        Raises
        ------
        UsageError
            If the file is no checkpoint.
        """
        from xgboost.core import XGBoostError

        path = joined(folder, _CHECKPOINT_FILE)
        if not file_exists(path):
            return None
        try:
            booster = read_booster(read_bytes(path))
            doc = json.loads(booster.attr(_CHECKPOINT_ATTRIBUTE) or "")
        except (XGBoostError, ValueError) as error:
            raise UsageError(
                f"{path!r} is not a checkpoint of XGBEstimator; remove it, or fit without resume",
                code="file-format",
                path=path,
            ) from error
        booster.set_attr(**{_CHECKPOINT_ATTRIBUTE: None})
        return cls(bytes(booster.save_raw("ubj")), **doc)


@dataclass(frozen=True)
class TreeModel:
    """Picklable snapshot of boosted trees for prediction tasks.

    Attributes
    ----------
    data : bytes
        The booster in XGBoost's format.
    missing : float
    result : {"value", "margin", "leaf", "contributions"}
        Predictions, margins, leaf indices, or SHAP values.
    categories : dict of int to list of str
        Categories by the index of the text feature.
    has_margin : bool
        Whether the last column is the base margin.
    settings : dict
        Keyword arguments that create the Estimator again, without functions.
    """

    data: bytes
    missing: float
    result: str
    categories: dict[int, list[str]]
    has_margin: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    def load_on(self, device: object) -> LoadedTrees:
        """Load the trees; `device` is ignored, since trees predict on the CPU."""
        import torch

        return LoadedTrees(self, read_booster(self.data, torch.get_num_threads()))


class LoadedTrees:
    """Boosted trees that are called with a batch of numpy columns."""

    squeezes = False

    def __init__(self, model: TreeModel, booster: xgboost.Booster):
        self._model, self._booster = model, booster

    @property
    def widths(self) -> list[int]:
        """Number of features, for arrays without a known length."""
        return [self._booster.num_features()]

    def __call__(self, batch: list) -> np.ndarray:
        import xgboost

        model, booster = self._model, self._booster
        margin = None
        if model.has_margin:
            *batch, margin = batch
            margin = np.asarray(margin, np.float32)
        block = self._block(batch)
        if block.shape[1] != booster.num_features():
            raise UsageError(
                f"The trees were trained with {booster.num_features()} features, got "
                f"{block.shape[1]}; pass the columns of the fit",
                code="model-input",
            )
        if model.result in ("value", "margin"):
            return booster.inplace_predict(
                block,
                predict_type=model.result,
                missing=model.missing,
                validate_features=False,
                base_margin=margin,
            )
        types = booster.feature_types
        matrix = xgboost.DMatrix(
            block,
            missing=model.missing,
            base_margin=margin,
            feature_types=types,
            enable_categorical="c" in (types or ()),
        )
        is_leaf = model.result == "leaf"
        return booster.predict(
            matrix, pred_leaf=is_leaf, pred_contribs=not is_leaf, validate_features=False
        )

    def _block(self, batch: list) -> np.ndarray:
        columns = []
        for index, values in enumerate(batch):
            if isinstance(values, dict):
                raise UsageError(
                    "The features of trees must be numbers, got a map; select its values as "
                    "columns",
                    code="data-dtype",
                )
            if values.dtype.kind == "S":
                if index not in self._model.categories:
                    raise UsageError(
                        f"Feature {index} holds texts, but it was no text in the fit; pass the "
                        "columns of the fit",
                        code="model-input",
                    )
                values = codes_of(values, self._model.categories[index])
            columns.append(values.reshape(len(values), -1))
        if len(columns) == 1:
            return np.ascontiguousarray(columns[0], dtype=np.float32)
        return np.concatenate([each.astype(np.float32, copy=False) for each in columns], axis=1)
