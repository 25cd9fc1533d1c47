"""Prediction in one process, by several threads at a time."""

from bigdl.orca.inference.inference_model import InferenceModel

__all__ = ["InferenceModel"]
