"""Functions in N processes, whoever starts them: launch, pools, engines, channel, shards."""

from bigdl.common.dropped import explain_imports

explain_imports()
