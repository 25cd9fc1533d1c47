"""Shared helpers: errors, argument checks, CPU, memory, environment and storage."""

from bigdl.common.dropped import explain_imports

explain_imports()
