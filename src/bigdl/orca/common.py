"""The import path that programs for BigDL 2.x use."""

from bigdl.orca.context import OrcaContext, init_orca_context, stop_orca_context
from bigdl.runtime.serialization import SafePickle

__all__ = ["OrcaContext", "SafePickle", "init_orca_context", "stop_orca_context"]
