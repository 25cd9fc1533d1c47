"""Dropped package of BigDL 2.x for time series; importing it raises an error."""

from bigdl.common.dropped import refuse

refuse(__name__)
