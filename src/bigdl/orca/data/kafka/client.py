"""Kafka client: settings, consumers, and retries while a broker is unavailable."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

from bigdl.common.errors import UsageError, require
from bigdl.common.timeouts import BROKER_CALL_S, BROKER_PAUSE_S, BROKER_S

if TYPE_CHECKING:
    from types import ModuleType

    from confluent_kafka import Consumer

T = TypeVar("T")


def confluent_kafka() -> ModuleType:
    """Import confluent_kafka; raise MissingExtraError if it is not installed."""
    return require("confluent_kafka", "kafka")


def settings_of(servers: str, options: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the client settings for server addresses and options.

    Parameters
    ----------
    servers : str
        Broker addresses, ``"host:port,host:port"``.
    options : mapping, optional
        Settings of librdkafka, such as ``security.protocol``.
    """
    if not isinstance(servers, str) or not servers.strip():
        raise UsageError(
            f'servers must be addresses such as "kafka-1:9092", got {servers!r}',
            code="argument-value",
            argument="servers",
        )
    extra = {key: str(value) for key, value in (options or {}).items()}
    return {"bootstrap.servers": servers, **extra}


def is_transient(error: Exception) -> bool:
    """Return True for a transient Kafka error, such as an unavailable broker."""
    reason = error.args[0] if error.args else None
    kafka = confluent_kafka().KafkaError
    transient = (
        kafka._TRANSPORT,
        kafka._ALL_BROKERS_DOWN,
        kafka._TIMED_OUT,
        kafka._TIMED_OUT_QUEUE,
        kafka._WAIT_COORD,
        kafka._STATE,
        kafka.COORDINATOR_LOAD_IN_PROGRESS,
        kafka.COORDINATOR_NOT_AVAILABLE,
        kafka.NOT_COORDINATOR,
        kafka.LEADER_NOT_AVAILABLE,
        kafka.NOT_LEADER_FOR_PARTITION,
        kafka.UNKNOWN_TOPIC_OR_PART,
        kafka.UNSTABLE_OFFSET_COMMIT,
        kafka.CONCURRENT_TRANSACTIONS,
        kafka.REQUEST_TIMED_OUT,
    )
    return isinstance(reason, kafka) and (reason.retriable() or reason.code() in transient)


def retry_while_unavailable(call: Callable[[], T], timeout: float = BROKER_S) -> T:
    """Call a function, and retry while the broker is unavailable."""
    deadline = time.monotonic() + timeout
    while True:
        try:
            return call()
        except confluent_kafka().KafkaException as error:
            if not is_transient(error) or time.monotonic() > deadline:
                raise
        time.sleep(BROKER_PAUSE_S)


@functools.lru_cache(maxsize=64)
def consumer_of(settings: tuple[tuple[str, str], ...], group: str) -> Consumer:
    """Return this process's consumer for the settings; it never commits automatically."""
    return confluent_kafka().Consumer(
        {
            "enable.auto.commit": "false",
            "auto.offset.reset": "error",
            "enable.partition.eof": "true",
            "isolation.level": "read_committed",
            "reconnect.backoff.ms": "500",  # each attempt prints a line to stderr
            **dict(settings),
            "group.id": group,
        }
    )


def partitions_of(consumer: Consumer, topics: list[str]) -> list[tuple[str, int]]:
    """Return ``(topic, partition number)`` for every partition of existing topics."""

    def list_partitions() -> list[tuple[str, int]]:
        known = consumer.list_topics(timeout=BROKER_CALL_S).topics
        missing = [name for name in topics if name not in known or not known[name].partitions]
        if missing:
            raise UsageError(
                f"Kafka has no topic {missing[0]!r}; create it first, or check the "
                "name and servers",
                code="path-missing",
                path=missing[0],
            )
        return [(name, number) for name in topics for number in sorted(known[name].partitions)]

    return retry_while_unavailable(list_partitions)


def offset_bounds(consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
    """Return the first offset of a partition, and the offset after its last record."""
    topic_partition = confluent_kafka().TopicPartition(topic, partition)
    return retry_while_unavailable(
        lambda: consumer.get_watermark_offsets(topic_partition, timeout=BROKER_CALL_S, cached=False)
    )
