"""Friesian: data preparation on Spark, models, metrics and serving for recommenders."""

from bigdl.common.dropped import explain_imports

explain_imports()
