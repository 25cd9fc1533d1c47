"""Expected types of the README's objects: the comment after each line is its type.

``test_public_types.py`` has mypy read this file; it is not run.
"""

from typing import reveal_type

import numpy as np
import pandas as pd
import torch
from pyspark.sql import DataFrame
from torch import nn

from bigdl.friesian.feature import FeaturePipeline, FeatureTable
from bigdl.nano.pytorch import InferenceOptimizer, Trainer
from bigdl.nano.tf.keras import InferenceOptimizer as KerasOptimizer
from bigdl.nano.tf.keras import Sequential
from bigdl.orca.automl.auto_estimator import AutoEstimator
from bigdl.orca.data import SparkXShards, XShards
from bigdl.orca.learn.openvino import Estimator as OpenVINOEstimator
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.tf2 import Estimator as KerasEstimator


def estimators(df: DataFrame, shards: SparkXShards, frame: pd.DataFrame, x: np.ndarray) -> None:
    est = Estimator.from_torch(model=lambda config: nn.Linear(2, 1), loss=nn.MSELoss())
    reveal_type(est)  # PyTorchEstimator
    reveal_type(est.fit(df))  # list[Any]
    reveal_type(est.evaluate(df))  # dict[Any, Any] | list[dict[Any, Any]]
    reveal_type(est.predict(df, feature_cols=["point"]))  # DataFrame
    reveal_type(est.predict(shards))  # SparkXShards
    reveal_type(est.predict(frame))  # DataFrame
    reveal_type(est.predict(x))  # ndarray[tuple[Any, ...], dtype[Any]] | Any
    reveal_type(est.get_model())  # Module
    keras = KerasEstimator.from_keras(model_creator=lambda config: Sequential([]))
    reveal_type(keras)  # KerasEstimator
    reveal_type(keras.fit(df))  # dict[Any, Any]
    reveal_type(keras.predict(df))  # DataFrame
    network = OpenVINOEstimator.from_openvino(model_path="model.xml")
    reveal_type(network)  # OpenvinoEstimator
    reveal_type(network.predict(shards))  # SparkXShards
    auto = AutoEstimator.from_torch(
        model_creator=lambda config: nn.Linear(2, 1), optimizer="Adam", loss=nn.MSELoss()
    )
    reveal_type(auto)  # AutoEstimator
    reveal_type(auto.get_best_config())  # dict[Any, Any]
    reveal_type(XShards.partition(x))  # SparkXShards | RayXShards


def nano(model: nn.Module, images: torch.Tensor) -> None:
    fast = InferenceOptimizer.quantize(model, accelerator="openvino", calib_data=images)
    reveal_type(fast)  # Module
    reveal_type(InferenceOptimizer.trace(model))  # Module
    reveal_type(InferenceOptimizer.get_context(fast))  # InferenceContext
    optimizer = InferenceOptimizer()
    reveal_type(optimizer.get_best_model())  # tuple[Module, str]
    reveal_type(optimizer.get_model("bf16"))  # Module
    reveal_type(Trainer())  # Trainer
    reveal_type(Trainer.compile(model))  # LightningModule
    reveal_type(Sequential([]))  # Sequential
    reveal_type(KerasOptimizer())  # InferenceOptimizer


def friesian(table: FeatureTable) -> None:
    reveal_type(FeatureTable.read_parquet("path"))  # FeatureTable
    reveal_type(table.fillna(0, "a"))  # FeatureTable
    reveal_type(table.category_encode("a"))  # tuple[FeatureTable, StringIndex | list[StringIndex]]
    reveal_type(table.df)  # DataFrame
    pipeline = FeaturePipeline()
    reveal_type(pipeline)  # FeaturePipeline
    reveal_type(pipeline.fillna(0, "a"))  # FeaturePipeline
    reveal_type(pipeline.fit(table))  # FeaturePipeline
    reveal_type(pipeline.transform_row({"a": 1}))  # dict[str, Any]
