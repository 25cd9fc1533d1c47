"""Helpers of all rooms: errors, checks, cores and threads, memory, storage."""

from bigdl.common.dropped import explain_imports

explain_imports()
