"""Nano: faster training and inference of PyTorch and Keras models on one machine.

Importing this package imports no framework and has no side effects.
"""

from bigdl.common.dropped import explain_imports

explain_imports()
