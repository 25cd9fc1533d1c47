"""Exactly-once sink from a streaming DataFrame to a Kafka topic.

Spark repeats a micro-batch if its completion is uncertain, which could write rows twice. Therefore
each task writes its rows in one Kafka transaction, together with the batch number, stored as the
offset of a consumer group. A repeated task first reads that number, and writes nothing if its batch
was already committed. Two attempts of one task share a transactional id, so Kafka lets only the
newer one commit.

Consumers see each row once if they read only committed records (``isolation.level`` is
``read_committed``, the default of librdkafka).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import LazyModule, UsageError
from bigdl.common.timeouts import BROKER_PAUSE_S, BROKER_S, SINK_CALL_S
from bigdl.orca.cluster.spark_calls import silent_when_closed
from bigdl.orca.data.feeds.spark_dataframe import check_columns
from bigdl.orca.data.kafka.client import (
    confluent_kafka,
    consumer_of,
    is_transient,
    retry_while_unavailable,
    settings_of,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from confluent_kafka import Consumer
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery
else:
    pa = LazyModule("pyarrow", "orca")


def write_kafka(
    data: DataFrame,
    servers: str,
    topic: str,
    checkpoint: str,
    *,
    key: str = "key",
    value: str = "value",
    name: str | None = None,
    trigger: dict[str, Any] | None = None,
    options: dict[str, str] | None = None,
) -> StreamingQuery:
    """Start a query that writes a streaming DataFrame to a topic, each row exactly once.

    This holds when the query is restarted with the same checkpoint, when its workers are lost, and
    when brokers are unavailable for up to two minutes. The plan must be deterministic: a repeated
    batch must have the same rows in each partition.

    Parameters
    ----------
    data : pyspark.sql.DataFrame
        Streaming DataFrame.
    servers, topic : str
        Broker addresses, and an existing topic.
    checkpoint : str
        Checkpoint directory, used by this query only.
    key, value : str
        String or binary columns.
    name : str, optional
        Name of the consumer groups that store the batch numbers, by default derived from the
        checkpoint path. Kafka deletes them after ``offsets.retention.minutes`` (a week) without a
        batch; a batch interrupted before that may then be written twice.
    trigger : dict, optional
        Arguments of ``DataStreamWriter.trigger``, e.g. ``{"availableNow": True}``; by default each
        batch starts when the previous one ends.
    options : dict of str to str, optional
        Client settings, such as ``{"security.protocol": "SSL"}``.

    Returns
    -------
    pyspark.sql.streaming.StreamingQuery

    Examples
    --------
    >>> from bigdl.common.errors import UsageError
    >>> from bigdl.orca import OrcaContext, init_orca_context
    >>> from bigdl.orca.data.kafka import write_kafka
    >>> sc = init_orca_context("local", cores=2)
    >>> rows = OrcaContext.get_spark_session().createDataFrame([("1", "cat")], ["key", "value"])
    >>> try:
    ...     write_kafka(rows, "broker:9092", "answers", "checkpoint")
    ... except UsageError as error:
    ...     print(error)
    write_kafka needs a streaming DataFrame; use data.write for this one
    """
    if not data.isStreaming:
        raise UsageError(
            "write_kafka needs a streaming DataFrame; use data.write for this one",
            code="data-type",
            argument="data",
        )
    confluent_kafka()
    settings = settings_of(servers, options)
    types = check_columns(data, [key, value])
    for column in (key, value):
        if types[column].typeName() not in ("string", "binary"):
            raise UsageError(
                f"Column '{column}' must be string or binary to be written to Kafka, but is "
                f"{types[column].simpleString()}; use to_json or cast it",
                code="data-dtype",
                column=column,
            )
    group = name or "bigdl-" + hashlib.sha256(checkpoint.encode()).hexdigest()[:16]
    rows = data.select(data[key].cast("binary").alias("k"), data[value].cast("binary").alias("v"))
    sink = _Sink(tuple(sorted(settings.items())), topic, group)

    def write(batch: DataFrame, number: int) -> None:
        written = batch.mapInArrow(silent_when_closed(sink.task(number)), "rows long")
        written.collect()  # Kafka has a task's rows when the task ends

    writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    return writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start()


@dataclass(frozen=True)
class _Sink:
    """Settings of a Kafka sink, shared by the tasks of all batches.

    Attributes
    ----------
    settings : tuple of (str, str)
        Client settings.
    topic, group : str
        Topic, and prefix of the consumer groups.
    """

    settings: tuple[tuple[str, str], ...]
    topic: str
    group: str

    def task(self, batch: int) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
        def write(batches: Iterable) -> Iterator:
            from pyspark import TaskContext

            context: Any = TaskContext.get()
            writer = _writer_of(self, context.partitionId())
            count = writer.write(batches, batch)
            yield pa.RecordBatch.from_arrays([pa.array([count], pa.int64())], ["rows"])

        return write


@dataclass
class _Writer:
    """Transactional Kafka producer for one partition of a query, in a Python worker of Spark.

    Attributes
    ----------
    sink : _Sink
    group : str
        Consumer group and transactional id.
    producer : confluent_kafka.Producer, optional
    next_batch : int
        Number of the first batch that is not committed in Kafka.
    """

    sink: _Sink
    group: str
    producer: Any = None
    next_batch: int = field(default=0)

    def write(self, batches: Iterable, batch: int) -> int:
        """Write the rows unless Kafka already has them, and return their number."""
        kafka = confluent_kafka()
        retry_while_unavailable(self._start)
        if self.next_batch > batch:
            return 0
        rows = [
            pair
            for each in batches
            for pair in zip(each.column(0).to_pylist(), each.column(1).to_pylist(), strict=True)
        ]
        deadline = time.monotonic() + BROKER_S
        while self.next_batch <= batch:
            try:
                self._transact(rows, batch)
            except kafka.KafkaException as error:
                # a new producer aborts the transaction and reads the committed batch number
                self.producer = None
                if not _may_repeat(error) or time.monotonic() > deadline:
                    raise
                time.sleep(BROKER_PAUSE_S)
                retry_while_unavailable(self._start)
        return len(rows)

    def _start(self) -> None:
        if self.producer is not None:
            return
        kafka = confluent_kafka()
        defaults = {"linger.ms": "5", "reconnect.backoff.ms": "500"}
        producer = kafka.Producer(
            {**defaults, **dict(self.sink.settings), "transactional.id": self.group}
        )
        producer.init_transactions(SINK_CALL_S)
        topic_partition = kafka.TopicPartition(self.sink.topic, 0)
        (committed,) = self._consumer().committed([topic_partition], timeout=SINK_CALL_S)
        self.producer, self.next_batch = producer, max(committed.offset, 0)

    def _transact(self, rows: list[tuple], batch: int) -> None:
        kafka, producer = confluent_kafka(), self.producer
        producer.begin_transaction()
        for key, value in rows:
            while True:
                try:
                    producer.produce(self.sink.topic, value, key)
                    break
                except BufferError:  # the send queue is full
                    producer.poll(0.1)
        offset = kafka.TopicPartition(self.sink.topic, 0, batch + 1)
        member = self._consumer().consumer_group_metadata()
        producer.send_offsets_to_transaction([offset], member, SINK_CALL_S)
        producer.commit_transaction(SINK_CALL_S)
        self.next_batch = batch + 1

    def _consumer(self) -> Consumer:
        return consumer_of(self.sink.settings, self.group)


def _may_repeat(error: Exception) -> bool:
    """Return True if a new producer can safely write the same rows again after this error."""
    reason = error.args[0]
    kafka = confluent_kafka().KafkaError
    fenced = reason.code() in (kafka._FENCED, kafka.INVALID_PRODUCER_EPOCH, kafka._PURGE_QUEUE)
    return fenced or reason.txn_requires_abort() or is_transient(error)


_writers: dict[tuple[_Sink, int], _Writer] = {}  # cache of this Python worker


def _writer_of(sink: _Sink, partition: int) -> _Writer:
    key = sink, partition
    if key not in _writers:
        _writers[key] = _Writer(sink, f"{sink.group}-{partition}")
    return _writers[key]
