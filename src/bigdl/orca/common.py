"""The import path that programs for BigDL 2.x use."""

from bigdl.orca.context import OrcaContext, init_orca_context, stop_orca_context

__all__ = ["OrcaContext", "init_orca_context", "stop_orca_context"]
