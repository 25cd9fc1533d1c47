"""Import path of the context functions for programs of BigDL 2.x."""

from bigdl.orca.context import OrcaContext, init_orca_context, stop_orca_context
from bigdl.runtime.serialization import SafePickle

__all__ = ["OrcaContext", "SafePickle", "init_orca_context", "stop_orca_context"]
