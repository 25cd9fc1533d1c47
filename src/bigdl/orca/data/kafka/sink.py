"""A streaming DataFrame to a topic of Kafka, each row exactly once.

Spark runs a micro-batch again when it cannot know that it has ended, and so would write its rows
twice. Here each task writes its rows in one transaction of Kafka, together with the number of its
batch, which is kept as the offset of a consumer group. A task that runs again asks for that number
first, and writes nothing if its batch is there already. Two attempts of one task have the same
transactional id, so Kafka lets only the younger one commit.

A consumer sees each row once if it reads committed records only (``isolation.level`` is
``read_committed``, in librdkafka by default).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import LazyModule, UsageError
from bigdl.common.timeouts import BROKER_PAUSE_S, BROKER_S, SINK_CALL_S
from bigdl.orca.cluster.spark_calls import silent_when_closed
from bigdl.orca.data.feeds.spark_dataframe import check_columns
from bigdl.orca.data.kafka.client import (
    confluent_kafka,
    consumer_of,
    is_passing,
    patiently,
    settings_of,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming import StreamingQuery

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

    That holds when the query ends in any way and is started again with the same checkpoint, when
    its workers are lost, and when brokers are away for up to two minutes. The plan may not shuffle
    its rows by chance: a batch that runs again must have the same rows in each partition.

    Parameters
    ----------
    data : pyspark.sql.DataFrame
        Streaming.
    servers, topic : str
        The topic must exist.
    checkpoint : str
        A directory of this query alone, where it notes how far it is.
    key, value : str
        Columns of text or bytes.
    name : str, optional
        Of the consumer groups that hold the numbers of the batches; by default it is made of the
        checkpoint's path. Kafka forgets them after ``offsets.retention.minutes`` without a batch
        (a week), and with them what a batch that was interrupted before has written.
    trigger : dict, optional
        Arguments of ``DataStreamWriter.trigger``, e.g. ``{"availableNow": True}``; by default the
        next batch starts when one has ended.
    options : dict of str to str, optional
        Settings of the client, such as ``{"security.protocol": "SSL"}``.

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
    write_kafka takes a streaming DataFrame; write this one by its write
    """
    if not data.isStreaming:
        raise UsageError(
            "write_kafka takes a streaming DataFrame; write this one by its write",
            code="data-type",
            argument="data",
        )
    confluent_kafka()
    settings = settings_of(servers, options)
    types = check_columns(data, [key, value])
    for column in (key, value):
        if types[column].typeName() not in ("string", "binary"):
            raise UsageError(
                f"Column '{column}' must be a string or binary to be written to Kafka, it is "
                f"{types[column].simpleString()}; use to_json or cast it",
                code="data-dtype",
                column=column,
            )
    group = name or "bigdl-" + hashlib.sha256(checkpoint.encode()).hexdigest()[:16]
    rows = data.select(data[key].cast("binary").alias("k"), data[value].cast("binary").alias("v"))
    sink = _Sink(tuple(sorted(settings.items())), topic, group)

    def write(batch: DataFrame, number: int) -> None:
        written = batch.mapInArrow(silent_when_closed(sink.task(number)), "rows long")
        written.collect()  # a task's rows are in Kafka when it ends

    writer = rows.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    return writer.trigger(**(trigger or {"processingTime": "0 seconds"})).start()


@dataclass(frozen=True)
class _Sink:
    """The state that the tasks of all batches share.

    Attributes
    ----------
    settings : tuple of (str, str)
        Of the client.
    topic, group : str
    """

    settings: tuple[tuple[str, str], ...]
    topic: str
    group: str

    def task(self, batch: int) -> Any:
        def write(batches: Iterable) -> Iterator:
            from pyspark import TaskContext

            context: Any = TaskContext.get()
            writer = _writer_of(self, context.partitionId())
            count = writer.write(batches, batch)
            yield pa.RecordBatch.from_arrays([pa.array([count], pa.int64())], ["rows"])

        return write


@dataclass
class _Writer:
    """The producer of one partition of a query, in a Python worker of Spark.

    Attributes
    ----------
    sink : _Sink
    group : str
        Its consumer group and transactional id.
    producer : confluent_kafka.Producer, optional
    next_batch : int
        The first that is not in Kafka, as this producer knows.
    """

    sink: _Sink
    group: str
    producer: Any = None
    next_batch: int = field(default=0)

    def write(self, batches: Iterable, batch: int) -> int:
        """Write the rows unless they are in Kafka, and return how many there were to write."""
        kafka = confluent_kafka()
        patiently(self._start)
        if self.next_batch > batch:
            return 0
        rows = [
            pair
            for each in batches
            for pair in zip(each.column(0).to_pylist(), each.column(1).to_pylist(), strict=True)
        ]
        give_up = time.monotonic() + BROKER_S
        while self.next_batch <= batch:
            try:
                self._transact(rows, batch)
            except kafka.KafkaException as error:
                # begun anew, this one ends what is left of the transaction, and asks if it is in
                self.producer = None
                if not _may_repeat(error) or time.monotonic() > give_up:
                    raise
                time.sleep(BROKER_PAUSE_S)
                patiently(self._start)
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
        place = kafka.TopicPartition(self.sink.topic, 0)
        (noted,) = self._consumer().committed([place], timeout=SINK_CALL_S)
        self.producer, self.next_batch = producer, max(noted.offset, 0)

    def _transact(self, rows: list[tuple], batch: int) -> None:
        kafka, producer = confluent_kafka(), self.producer
        producer.begin_transaction()
        for key, value in rows:
            while True:
                try:
                    producer.produce(self.sink.topic, value, key)
                    break
                except BufferError:  # the queue of what is to be sent is full
                    producer.poll(0.1)
        place = kafka.TopicPartition(self.sink.topic, 0, batch + 1)
        member = self._consumer().consumer_group_metadata()
        producer.send_offsets_to_transaction([place], member, SINK_CALL_S)
        producer.commit_transaction(SINK_CALL_S)
        self.next_batch = batch + 1

    def _consumer(self) -> Any:
        return consumer_of(self.sink.settings, self.group)


def _may_repeat(error: Any) -> bool:
    """Return True if a new producer may write the same rows after this error."""
    reason = error.args[0]
    kafka = confluent_kafka().KafkaError
    fenced = reason.code() in (kafka._FENCED, kafka.INVALID_PRODUCER_EPOCH, kafka._PURGE_QUEUE)
    return fenced or reason.txn_requires_abort() or is_passing(error)


_writers: dict[tuple[_Sink, int], _Writer] = {}  # of this Python worker


def _writer_of(sink: _Sink, partition: int) -> _Writer:
    key = sink, partition
    if key not in _writers:
        _writers[key] = _Writer(sink, f"{sink.group}-{partition}")
    return _writers[key]
