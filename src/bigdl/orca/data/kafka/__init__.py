"""Kafka as the source and the sink of streams, with exactly-once processing of each row."""

from bigdl.orca.data.kafka.sink import write_kafka
from bigdl.orca.data.kafka.stream import read_kafka

__all__ = ["read_kafka", "write_kafka"]
