"""Execution of functions in worker processes: launch, pools, engines, channel, shards."""

from bigdl.common.dropped import explain_imports

explain_imports()
