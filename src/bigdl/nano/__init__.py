"""Nano: faster PyTorch and Keras on one machine, with ordinary code.

Importing this package imports no framework and has no side effects.
"""

from bigdl.common.dropped import explain_imports

explain_imports()
