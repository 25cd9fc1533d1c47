"""Kafka as a streaming source and sink, with exactly-once processing of each row."""

from bigdl.orca.data.kafka.sink import write_kafka
from bigdl.orca.data.kafka.stream import read_kafka

__all__ = ["read_kafka", "write_kafka"]
