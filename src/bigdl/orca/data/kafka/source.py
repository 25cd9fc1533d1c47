"""Kafka as a Python data source of Spark, for sessions without Spark's Kafka connector JAR.

Spark calls the reader on the driver for the offsets of a micro-batch, and in tasks for the records
of each Kafka partition. Spark writes the offsets to the checkpoint before it runs the batch, so a
repeated batch has the same records.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from bigdl.common.errors import BigDLError, UsageError
from bigdl.common.timeouts import BROKER_S, SOURCE_POLL_S
from bigdl.orca.data.kafka.client import (
    confluent_kafka,
    consumer_of,
    offset_bounds,
    partitions_of,
    settings_of,
)

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message
    from pyspark.sql.streaming.datasource import ReadLimit
    from pyspark.sql.types import StructType

NAME = "bigdl-kafka"
SCHEMA = "key binary, value binary, topic string, partition int, offset long, timestamp timestamp"
_ROWS = 1000  # rows per Arrow batch

Offsets = dict[str, dict[str, int]]
"""Offset of the next record, by topic and partition number."""


class KafkaDataSource(DataSource):
    """Spark data source that streams the records of topics.

    :func:`bigdl.orca.data.kafka.read_kafka` uses it. The options are those of Spark's connector:
    ``kafka.bootstrap.servers`` and other settings of the client with this prefix, ``subscribe``,
    ``startingOffsets`` (``earliest`` or ``latest``) and ``maxOffsetsPerTrigger``.
    """

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return SCHEMA

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        return KafkaReader(dict(self.options))


@dataclass
class OffsetRange(InputPartition):
    """Records of a Kafka partition from offset `start` up to, but not including, offset `end`."""

    topic: str
    partition: int
    start: int
    end: int


class KafkaReader(DataSourceStreamReader):
    """Stream reader that provides offsets on the driver and records in tasks."""

    def __init__(self, options: dict[str, str]):
        lowered = {key.lower(): value for key, value in options.items()}
        client = {k.removeprefix("kafka."): v for k, v in lowered.items() if k.startswith("kafka.")}
        self._settings = tuple(
            sorted(settings_of(client.pop("bootstrap.servers", ""), client).items())
        )
        self._topics = [name.strip() for name in lowered.get("subscribe", "").split(",") if name]
        if not self._topics:
            raise UsageError(
                "The option subscribe must name one or more Kafka topics, such as a,b",
                code="argument-missing",
                argument="subscribe",
            )
        self._starts = lowered.get("startingoffsets", "latest")
        if self._starts not in ("earliest", "latest"):
            raise UsageError(
                f'startingOffsets must be "earliest" or "latest", got {self._starts!r}',
                code="argument-value",
                argument="startingOffsets",
                allowed=["earliest", "latest"],
            )
        most = lowered.get("maxoffsetspertrigger")
        self._most = None if most is None else int(most)

    def initialOffset(self) -> Offsets:
        bound = 0 if self._starts == "earliest" else 1
        return self._by_topic(lambda topic, number: self._ends(topic, number)[bound])

    def getDefaultReadLimit(self) -> ReadLimit:
        from pyspark.sql.streaming import datasource

        every = datasource.ReadAllAvailable()
        return every if self._most is None else datasource.ReadMaxRows(self._most)

    def latestOffset(self, start: Any = None, limit: object = None) -> Offsets:  # start: Offsets
        latest = self._by_topic(lambda topic, number: self._ends(topic, number)[1])
        most = getattr(limit, "max_rows", None)
        return latest if most is None or start is None else limit_offsets(start, latest, most)

    def partitions(self, start: Any, end: Any) -> Sequence[OffsetRange]:  # start: Offsets
        ranges = []
        for topic, offsets in end.items():
            for number, last in offsets.items():
                first = start.get(topic, {}).get(number)
                if first is None:  # a new partition
                    first = self._ends(topic, int(number))[0]
                if first < last:
                    ranges.append(OffsetRange(topic, int(number), first, last))
        return ranges

    def read(self, partition: Any) -> Iterator[pa.RecordBatch]:  # partition: an OffsetRange
        yield from records(self._consumer(), partition)

    def _consumer(self) -> Consumer:
        return consumer_of(self._settings, "bigdl-kafka-source")

    def _ends(self, topic: str, number: int) -> tuple[int, int]:
        return offset_bounds(self._consumer(), topic, number)

    def _by_topic(self, offset_of: Callable[[str, int], int]) -> Offsets:
        offsets: Offsets = {topic: {} for topic in self._topics}
        for topic, number in partitions_of(self._consumer(), self._topics):
            offsets[topic][str(number)] = offset_of(topic, number)
        return offsets


def limit_offsets(start: Offsets, latest: Offsets, most: int) -> Offsets:
    """Return end offsets for at most `most` records, divided in proportion to partition lags."""
    waiting = {
        (topic, number): max(0, last - start.get(topic, {}).get(number, 0))
        for topic, offsets in latest.items()
        for number, last in offsets.items()
    }
    total, remaining = sum(waiting.values()), most
    if total <= most:
        return latest
    end: Offsets = {topic: {} for topic in latest}
    for index, (topic, number) in enumerate(waiting):
        lag = waiting[topic, number]
        share = min(
            lag, remaining if index == len(waiting) - 1 else -(-lag * most // total), remaining
        )
        remaining -= share
        end[topic][number] = start.get(topic, {}).get(number, 0) + share
    return end


def records(
    consumer: Any, offset_range: OffsetRange
) -> Iterator[pa.RecordBatch]:  # consumer: of any Kafka client
    """Read the records of an offset range and yield them in batches.

    Aborted transactions and transaction markers occupy offsets without records, possibly also at
    the end of a range.

    Raises
    ------
    BigDLError
        If the broker deleted records of the range, or sends none for two minutes.
    """
    kafka = confluent_kafka()
    consumer.assign(
        [kafka.TopicPartition(offset_range.topic, offset_range.partition, offset_range.start)]
    )
    rows: list[tuple] = []
    deadline = time.monotonic() + BROKER_S
    try:
        while True:
            messages = consumer.consume(_ROWS, timeout=SOURCE_POLL_S if not rows else 0.05)
            for message in messages:
                error = message.error()
                if error is None and message.offset() < offset_range.end:
                    rows.append(row_of(message))
                    if message.offset() < offset_range.end - 1:
                        continue
                elif error is not None and error.code() != kafka.KafkaError._PARTITION_EOF:
                    if error.retriable() or error.code() == kafka.KafkaError._TRANSPORT:
                        continue
                    raise BigDLError(
                        f"Cannot read the Kafka records {offset_range.start} to "
                        f"{offset_range.end - 1} of topic {offset_range.topic!r}, partition "
                        f"{offset_range.partition}: {error.str()}"
                    )
                if rows:
                    yield batch_of(rows)
                return
            if messages:
                deadline = time.monotonic() + BROKER_S
            elif time.monotonic() > deadline:
                raise BigDLError(
                    f"Kafka sent no record of topic {offset_range.topic!r}, partition "
                    f"{offset_range.partition}, for {BROKER_S:.0f} s"
                )
            if len(rows) >= _ROWS:
                yield batch_of(rows)
                rows = []
    finally:
        consumer.unassign()


def row_of(message: Message) -> tuple:
    _, milliseconds = message.timestamp()
    position = message.topic(), message.partition(), message.offset()
    return message.key(), message.value(), *position, milliseconds * 1000


def batch_of(rows: list[tuple]) -> pa.RecordBatch:
    fields = [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
    ]
    columns = zip(*rows, strict=True)
    arrays = [pa.array(c, type_) for c, (_, type_) in zip(columns, fields, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
