"""Orca: distributed training and prediction on the data of a Spark cluster.

Importing this package starts nothing and loads no engine; :func:`init_orca_context` does.
"""

from bigdl.common.dropped import explain_imports
from bigdl.orca.context import OrcaContext, init_orca_context, stop_orca_context
from bigdl.runtime.serialization import SafePickle

__all__ = ["OrcaContext", "SafePickle", "init_orca_context", "stop_orca_context"]

explain_imports()
