"""Prediction by threads of one process, and by programs over batches of a DataFrame."""

from bigdl.orca.inference.batches import map_batches
from bigdl.orca.inference.inference_model import InferenceModel

__all__ = ["InferenceModel", "map_batches"]
