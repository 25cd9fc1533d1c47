"""Functions in N processes, whoever starts them: launch, pools, engines, channel, shards."""
