"""Searching for hyper-parameters: spaces, and what lets classes and functions take them."""

from bigdl.nano.automl.hpo import space
from bigdl.nano.automl.hpo.auto import args, func, obj
from bigdl.nano.automl.hpo.models import plmodel, tfmodel

__all__ = ["args", "func", "obj", "plmodel", "space", "tfmodel"]
