"""Nano: ordinary PyTorch and Keras code, faster on one machine.

Importing this package loads no framework and changes nothing.
"""

from bigdl.common.dropped import explain_imports

explain_imports()
