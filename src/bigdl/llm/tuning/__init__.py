"""Fine-tuning of language models from tables."""

from bigdl.llm.tuning.estimator import TextEstimator

__all__ = ["TextEstimator"]
