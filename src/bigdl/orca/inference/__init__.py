"""Thread-safe model inference in one process, and batch functions over Spark DataFrames."""

from bigdl.orca.inference.batches import map_batches
from bigdl.orca.inference.inference_model import InferenceModel

__all__ = ["InferenceModel", "map_batches"]
