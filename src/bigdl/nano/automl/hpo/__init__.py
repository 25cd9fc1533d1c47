"""Search spaces, and decorators that let classes and functions take them."""

from bigdl.nano.automl.hpo import space
from bigdl.nano.automl.hpo.objects import args, func, obj, plmodel, tfmodel

__all__ = ["args", "func", "obj", "plmodel", "space", "tfmodel"]
