"""Kafka as the source and the sink of a stream of rows, each of which is answered exactly once."""

from bigdl.orca.data.kafka.sink import write_kafka
from bigdl.orca.data.kafka.stream import read_kafka

__all__ = ["read_kafka", "write_kafka"]
