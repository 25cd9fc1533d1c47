"""Base classes of a table's models; the constant and the linear model."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np

from bigdl.orca.automl import hp
from bigdl.orca.automl.table.columns import REGRESSION, MatrixRows
from bigdl.orca.automl.table.preparation import FittedPreparation

_LINEAR_CATEGORIES = 32  # one column for each of the most frequent categories


@dataclass
class TrainingSettings:
    """Settings that all models of a search share.

    Attributes
    ----------
    task : {"binary", "multiclass", "regression"}
    classes : int
        Number of classes; 0 for a regression.
    counts : list of int
        Number of categories of each category column of the table.
    seed, threads : int
    """

    task: str
    classes: int
    counts: list[int]
    seed: int
    threads: int


@dataclass
class TrainingRows:
    """Rows and settings of the training of one model.

    Attributes
    ----------
    rows, y : MatrixRows and ndarray
        Training rows, and class indices or values.
    held_out, held_out_y : MatrixRows and ndarray
        Rows that decide when training stops; they are not those on which the model is scored.
    settings : TrainingSettings
    deadline : float
        Time (``time.time()``) at which training stops with what it has learned.
    """

    rows: MatrixRows
    y: np.ndarray
    held_out: MatrixRows
    held_out_y: np.ndarray
    settings: TrainingSettings
    deadline: float

    @property
    def is_late(self) -> bool:
        """True after the deadline."""
        return time.time() > self.deadline


class FoldModel(ABC):
    """Base class of the models of a table.

    A model is trained by :meth:`fit`; :meth:`scores` are probabilities of shape ``(n, classes)``,
    or the values of a regression.
    """

    #: name in leaderboards
    name: ClassVar[str]
    #: packages that the model needs
    packages: ClassVar[tuple[str, ...]] = ()
    #: extra that installs the packages
    extra: ClassVar[str] = "xgboost"
    #: configurations that are always tried, then a space to draw from
    defaults: ClassVar[tuple[dict[str, Any], ...]] = ({},)

    @classmethod
    def space(cls) -> dict[str, Any] | None:
        """Return the search space, or None if there is nothing to draw."""
        return None

    @classmethod
    @abstractmethod
    def fit(cls, config: dict[str, Any], data: TrainingRows) -> FoldModel:
        """Train a model."""

    @abstractmethod
    def scores(self, rows: MatrixRows) -> np.ndarray:
        """Return probabilities of the classes, or values."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Return arrays and plain values from which :meth:`of_state` creates the model."""

    @classmethod
    @abstractmethod
    def of_state(cls, state: dict[str, Any]) -> FoldModel:
        """Create a model from its state."""


class ConstantModel(FoldModel):
    """Model that predicts the frequencies of the classes, or the mean: the baseline."""

    name = "constant"

    def __init__(self, value: np.ndarray):
        self._value = value

    @classmethod
    def fit(cls, config, data):
        y = np.concatenate([data.y, data.held_out_y])
        if data.settings.task == REGRESSION:
            return cls(np.array([y.mean()]))
        return cls(np.bincount(y, minlength=data.settings.classes) / len(y))

    def scores(self, rows):
        value = self._value
        return np.full(len(rows), value[0]) if len(value) == 1 else np.tile(value, (len(rows), 1))

    def state(self):
        return {"value": self._value}

    @classmethod
    def of_state(cls, state):
        return cls(state["value"])


@dataclass
class PreparedModel(FoldModel):
    """Base class of models of prepared rows, whose fields are their state."""

    preparation: FittedPreparation

    def state(self):
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return {**values, "preparation": self.preparation.state()}

    @classmethod
    def of_state(cls, state):
        return cls(**{**state, "preparation": FittedPreparation(**state["preparation"])})


@dataclass
class LinearModel(PreparedModel):
    """Logistic or ridge regression of scikit-learn on scaled numbers and indicator columns."""

    name = "linear"
    packages = ("sklearn",)
    defaults = ({"strength": 1.0},)

    weights: np.ndarray
    bias: np.ndarray

    @classmethod
    def space(cls):
        return {"strength": hp.loguniform(1e-3, 1e3)}

    @classmethod
    def fit(cls, config, data):
        from sklearn.linear_model import LogisticRegression, Ridge

        preparation = FittedPreparation.fit(data.rows, data.settings.counts)
        x, y = _design(preparation, data.rows), data.y
        if data.settings.task == REGRESSION:
            ridge = Ridge(alpha=config["strength"]).fit(x, y)
            return cls(preparation, ridge.coef_.reshape(-1, 1), np.atleast_1d(ridge.intercept_))
        known = np.unique(y)
        weights = np.zeros((x.shape[1], data.settings.classes))
        bias = np.full(data.settings.classes, -1e3)  # of classes that the training rows lack
        bias[known] = 0
        if len(known) > 1:
            model = LogisticRegression(C=1 / config["strength"], max_iter=300)
            model.fit(x, y)
            columns = known[1:] if len(known) == 2 else known
            weights[:, columns], bias[columns] = model.coef_.T, model.intercept_
        return cls(preparation, weights, bias)

    def scores(self, rows):
        values = _design(self.preparation, rows) @ self.weights + self.bias
        return values[:, 0] if values.shape[1] == 1 else softmax(values)


def _design(preparation: FittedPreparation, rows: MatrixRows) -> np.ndarray:
    """Return scaled numbers and one column for each frequent category."""
    parts = [preparation.scaled_numbers(rows)]
    codes = preparation.known_codes(rows)
    for index, width in enumerate(preparation.widths):
        frequent = np.arange(min(width, _LINEAR_CATEGORIES))
        parts.append((codes[:, index, None] == frequent).astype(np.float32))
    return np.concatenate(parts, axis=1)


def softmax(values: np.ndarray) -> np.ndarray:
    """Convert scores of classes to probabilities."""
    shifted = np.exp(values - values.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)
