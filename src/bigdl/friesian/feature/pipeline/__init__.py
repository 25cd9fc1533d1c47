"""Pipelines of features: recorded once, learned once, run on Spark, on files or row by row."""

from bigdl.friesian.feature.pipeline.hosts import LocalWorkers
from bigdl.friesian.feature.pipeline.pipeline import FeaturePipeline

__all__ = ["FeaturePipeline", "LocalWorkers"]
