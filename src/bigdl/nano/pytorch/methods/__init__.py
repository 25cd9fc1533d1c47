"""The acceleration methods of PyTorch, in the order in which ``optimize`` tries them."""

from bigdl.nano.pytorch.methods.eager import EAGER

METHODS = [*EAGER]
