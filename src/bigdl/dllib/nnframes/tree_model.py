"""Gradient-boosted trees as Spark ML stages, by the packages that bring them.

Each name makes a stage of ``xgboost.spark`` or of SynapseML's LightGBM, which are installed beside
BigDL; the stage that comes back is theirs.
"""

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
    """Makes an object of another package's class, whose name the subclass gives."""

    _module: str
    _name: str
    _install: str

    def __init_subclass__(cls, name: str = "", **options: Any):
        super().__init_subclass__(**options)
        cls._name = name

    def __new__(cls, params: dict[str, Any] | None = None, **kwargs):
        return cls._theirs()(**{**(params or {}), **kwargs})

    @classmethod
    def _theirs(cls) -> Any:
        import importlib

        try:
            return getattr(importlib.import_module(cls._module), cls._name)
        except ImportError as error:
            raise MissingExtraError(
                f"{cls.__name__} is {cls._module}.{cls._name}, which cannot be imported "
                f"({error}); {cls._install}"
            ) from error

    @classmethod
    def load(cls, path: str) -> Any:
        """Read a stage that was saved."""
        return cls._theirs().load(path)

    loadModel = load


class _XGBoost(_Tree):
    _module, _install = "xgboost.spark", "run: pip install xgboost scikit-learn"


class XGBClassifier(_XGBoost, name="SparkXGBClassifier"):
    """``xgboost.spark.SparkXGBClassifier``; parameters as a dict or by keyword."""


class XGBClassifierModel(_XGBoost, name="SparkXGBClassifierModel"):
    """``xgboost.spark.SparkXGBClassifierModel``."""


class XGBRegressor(_XGBoost, name="SparkXGBRegressor"):
    """``xgboost.spark.SparkXGBRegressor``; parameters as a dict or by keyword."""


class XGBRegressorModel(_XGBoost, name="SparkXGBRegressorModel"):
    """``xgboost.spark.SparkXGBRegressorModel``."""


class _LightGBM(_Tree):
    _module = "synapse.ml.lightgbm"
    _install = (
        "add SynapseML to Spark (its package com.microsoft.azure:synapseml-lightgbm), or use "
        "XGBClassifier and XGBRegressor"
    )


class LightGBMClassifier(_LightGBM, name="LightGBMClassifier"):
    """``synapse.ml.lightgbm.LightGBMClassifier``; parameters as a dict or by keyword."""


class LightGBMClassifierModel(_LightGBM, name="LightGBMClassificationModel"):
    """``synapse.ml.lightgbm.LightGBMClassificationModel``."""


class LightGBMRegressor(_LightGBM, name="LightGBMRegressor"):
    """``synapse.ml.lightgbm.LightGBMRegressor``; parameters as a dict or by keyword."""


class LightGBMRegressorModel(_LightGBM, name="LightGBMRegressionModel"):
    """``synapse.ml.lightgbm.LightGBMRegressionModel``."""
