"""Gradient-boosted trees as Spark ML stages, implemented by XGBoost and SynapseML.

Each class constructs a stage of ``xgboost.spark`` or of SynapseML's LightGBM, which have to be
installed in addition to BigDL. The returned stage is an object of that package.
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
    """Base class of classes that create Spark ML stages of other packages."""

    _module: str
    _name: str
    _install: str

    def __init_subclass__(cls, name: str = "", **options: object):
        super().__init_subclass__(**options)
        cls._name = name

    def __new__(cls, params: dict[str, Any] | None = None, **kwargs):
        return cls._wrapped_class()(**{**(params or {}), **kwargs})

    @classmethod
    def _wrapped_class(cls) -> type[Any]:
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
        """Load a saved stage."""
        return cls._wrapped_class().load(path)

    loadModel = load


class _XGBoost(_Tree):
    _module, _install = "xgboost.spark", "run: pip install xgboost scikit-learn"


class XGBClassifier(_XGBoost, name="SparkXGBClassifier"):
    """Creates an ``xgboost.spark.SparkXGBClassifier`` from a dict or keywords.

    Examples
    --------
    >>> from bigdl.dllib.nnframes.tree_model import XGBClassifier
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from pyspark.ml.linalg import Vectors
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = [(Vectors.dense(-1.0), 0), (Vectors.dense(1.0), 1)] * 4
    >>> frame = OrcaContext.get_spark_session().createDataFrame(rows, ["features", "label"])
    >>> model = XGBClassifier({"n_estimators": 3, "min_child_weight": 0}).fit(frame)
    >>> [row.prediction for row in model.transform(frame).limit(2).collect()]
    [0.0, 1.0]
    """


class XGBClassifierModel(_XGBoost, name="SparkXGBClassifierModel"):
    """Loads a saved ``xgboost.spark.SparkXGBClassifierModel``.

    Examples
    --------
    >>> from bigdl.dllib.nnframes.tree_model import XGBClassifier, XGBClassifierModel
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from pyspark.ml.linalg import Vectors
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = [(Vectors.dense(-1.0), 0), (Vectors.dense(1.0), 1)] * 4
    >>> frame = OrcaContext.get_spark_session().createDataFrame(rows, ["features", "label"])
    >>> XGBClassifier(n_estimators=3).fit(frame).save("trees")
    >>> XGBClassifierModel.load("trees").getOrDefault("n_estimators")
    3
    """


class XGBRegressor(_XGBoost, name="SparkXGBRegressor"):
    """Creates an ``xgboost.spark.SparkXGBRegressor`` from a dict or keywords.

    Examples
    --------
    >>> from bigdl.dllib.nnframes.tree_model import XGBRegressor
    >>> from bigdl.orca import init_orca_context
    >>> sc = init_orca_context("local", cores=2)
    >>> XGBRegressor({"n_estimators": 3}, max_depth=2).getOrDefault("max_depth")
    2
    """


class XGBRegressorModel(_XGBoost, name="SparkXGBRegressorModel"):
    """Loads a saved ``xgboost.spark.SparkXGBRegressorModel``.

    Examples
    --------
    >>> from bigdl.dllib.nnframes.tree_model import XGBRegressor, XGBRegressorModel
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from pyspark.ml.linalg import Vectors
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = [(Vectors.dense(-1.0), 0.0), (Vectors.dense(1.0), 1.0)] * 4
    >>> frame = OrcaContext.get_spark_session().createDataFrame(rows, ["features", "label"])
    >>> XGBRegressor(n_estimators=3).fit(frame).save("trees")
    >>> XGBRegressorModel.load("trees").getOrDefault("n_estimators")
    3
    """


class _LightGBM(_Tree):
    _module = "synapse.ml.lightgbm"
    _install = (
        "add SynapseML to Spark (its package com.microsoft.azure:synapseml-lightgbm), or use "
        "XGBClassifier and XGBRegressor"
    )


class LightGBMClassifier(_LightGBM, name="LightGBMClassifier"):
    """Creates a ``synapse.ml.lightgbm.LightGBMClassifier`` from a dict or keywords.

    Examples
    --------
    >>> from bigdl.common.errors import MissingExtraError
    >>> from bigdl.dllib.nnframes.tree_model import LightGBMClassifier
    >>> try:
    ...     stage = LightGBMClassifier({"numIterations": 10})
    ... except MissingExtraError as error:  # without SynapseML
    ...     print(error)
    LightGBMClassifier is ...; add SynapseML to Spark
    (its package com.microsoft.azure:synapseml-lightgbm), or use XGBClassifier and XGBRegressor
    """


class LightGBMClassifierModel(_LightGBM, name="LightGBMClassificationModel"):
    """Loads a saved ``synapse.ml.lightgbm.LightGBMClassificationModel``.

    Examples
    --------
    >>> from bigdl.common.errors import MissingExtraError
    >>> from bigdl.dllib.nnframes.tree_model import LightGBMClassifierModel
    >>> try:
    ...     stage = LightGBMClassifierModel.load("trees")
    ... except MissingExtraError as error:  # without SynapseML
    ...     print(error)
    LightGBMClassifierModel is ...; add SynapseML to Spark
    (its package com.microsoft.azure:synapseml-lightgbm), or use XGBClassifier and XGBRegressor
    """


class LightGBMRegressor(_LightGBM, name="LightGBMRegressor"):
    """Creates a ``synapse.ml.lightgbm.LightGBMRegressor`` from a dict or keywords.

    Examples
    --------
    >>> from bigdl.common.errors import MissingExtraError
    >>> from bigdl.dllib.nnframes.tree_model import LightGBMRegressor
    >>> try:
    ...     stage = LightGBMRegressor({"numIterations": 10})
    ... except MissingExtraError as error:  # without SynapseML
    ...     print(error)
    LightGBMRegressor is ...; add SynapseML to Spark
    (its package com.microsoft.azure:synapseml-lightgbm), or use XGBClassifier and XGBRegressor
    """


class LightGBMRegressorModel(_LightGBM, name="LightGBMRegressionModel"):
    """Loads a saved ``synapse.ml.lightgbm.LightGBMRegressionModel``.

    Examples
    --------
    >>> from bigdl.common.errors import MissingExtraError
    >>> from bigdl.dllib.nnframes.tree_model import LightGBMRegressorModel
    >>> try:
    ...     stage = LightGBMRegressorModel.load("trees")
    ... except MissingExtraError as error:  # without SynapseML
    ...     print(error)
    LightGBMRegressorModel is ...; add SynapseML to Spark
    (its package com.microsoft.azure:synapseml-lightgbm), or use XGBClassifier and XGBRegressor
    """
