"""Searching with Nano's Trainer."""

from bigdl.nano.automl.pytorch.searcher import HPOSearcher

__all__ = ["HPOSearcher"]
