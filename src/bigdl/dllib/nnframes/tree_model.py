"""Gradient-boosted trees as Spark ML stages, by the packages that bring them.

Each name makes a stage of ``xgboost.spark`` or of SynapseML's LightGBM, which are installed beside
BigDL; the stage that comes back is theirs.
"""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import MissingExtraError

__all__ = [
    "LightGBMClassifier",
    "LightGBMClassifierModel",
    "LightGBMRegressor",
    "LightGBMRegressorModel",
    "XGBClassifier",
    "XGBClassifierModel",
    "XGBRegressor",
    "XGBRegressorModel",
]


class _Tree:
    """Makes an object of another package's class."""

    _module, _class, _install = "", "", ""

    def __new__(cls, params: dict[str, Any] | None = None, **kwargs):
        return cls._theirs()(**{**(params or {}), **kwargs})

    @classmethod
    def _theirs(cls):
        import importlib

        try:
            return getattr(importlib.import_module(cls._module), cls._class)
        except ImportError as error:
            raise MissingExtraError(
                f"{cls.__name__} is {cls._module}.{cls._class}, which cannot be imported "
                f"({error}); {cls._install}"
            ) from error

    @classmethod
    def load(cls, path: str):
        """A stage that was saved."""
        return cls._theirs().load(path)

    loadModel = load


class _XGBoost(_Tree):
    _module, _install = "xgboost.spark", "run: pip install xgboost scikit-learn"


class XGBClassifier(_XGBoost):
    """``xgboost.spark.SparkXGBClassifier``; parameters as a dict or by keyword."""

    _class = "SparkXGBClassifier"


class XGBClassifierModel(_XGBoost):
    """``xgboost.spark.SparkXGBClassifierModel``."""

    _class = "SparkXGBClassifierModel"


class XGBRegressor(_XGBoost):
    """``xgboost.spark.SparkXGBRegressor``; parameters as a dict or by keyword."""

    _class = "SparkXGBRegressor"


class XGBRegressorModel(_XGBoost):
    """``xgboost.spark.SparkXGBRegressorModel``."""

    _class = "SparkXGBRegressorModel"


class _LightGBM(_Tree):
    _module = "synapse.ml.lightgbm"
    _install = (
        "add SynapseML to Spark (its package com.microsoft.azure:synapseml-lightgbm), or use "
        "XGBClassifier and XGBRegressor"
    )


class LightGBMClassifier(_LightGBM):
    """``synapse.ml.lightgbm.LightGBMClassifier``; parameters as a dict or by keyword."""

    _class = "LightGBMClassifier"


class LightGBMClassifierModel(_LightGBM):
    """``synapse.ml.lightgbm.LightGBMClassificationModel``."""

    _class = "LightGBMClassificationModel"


class LightGBMRegressor(_LightGBM):
    """``synapse.ml.lightgbm.LightGBMRegressor``; parameters as a dict or by keyword."""

    _class = "LightGBMRegressor"


class LightGBMRegressorModel(_LightGBM):
    """``synapse.ml.lightgbm.LightGBMRegressionModel``."""

    _class = "LightGBMRegressionModel"
