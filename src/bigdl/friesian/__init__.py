"""Friesian: preparing and serving the data of recommenders on Spark."""

from bigdl.common.dropped import explain_imports

explain_imports()
