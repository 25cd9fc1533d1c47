"""Serving on Flink, of BigDL 2.x: importing it says what takes its place."""

from bigdl.common.dropped import refuse

refuse(__name__)
