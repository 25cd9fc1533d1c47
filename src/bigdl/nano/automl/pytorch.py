"""Hyper-parameter search for PyTorch models, under the import path of BigDL 2.x."""

from bigdl.nano.pytorch.search import HPOSearcher as HPOSearcher
