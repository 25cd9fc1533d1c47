"""Searching the hyper-parameters of PyTorch models, under the name of BigDL 2.x."""

from bigdl.nano.pytorch.search import HPOSearcher as HPOSearcher
