"""The client of Kafka: its settings, and calls that wait for a broker that is away."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from bigdl.common.errors import UsageError, require
from bigdl.common.timeouts import BROKER_CALL_S, BROKER_PAUSE_S, BROKER_S

if TYPE_CHECKING:
    from confluent_kafka import Consumer

T = TypeVar("T")


def confluent_kafka() -> Any:
    """The package, or a MissingExtraError."""
    return require("confluent_kafka", "kafka")


def settings_of(servers: str, options: Mapping[str, str] | None = None) -> dict[str, str]:
    """Settings of a client.

    Parameters
    ----------
    servers : str
        ``"host:port,host:port"``.
    options : mapping, optional
        Settings of librdkafka, such as ``security.protocol``.
    """
    if not isinstance(servers, str) or not servers.strip():
        raise UsageError(
            f'servers must be addresses such as "kafka-1:9092", got {servers!r}',
            code="argument-value",
            argument="servers",
        )
    given = {key: str(value) for key, value in (options or {}).items()}
    return {"bootstrap.servers": servers, **given}


def is_passing(error: Any) -> bool:
    """Return True for an error of Kafka that goes away when the broker is back."""
    reason = error.args[0] if error.args else None
    kafka = confluent_kafka().KafkaError
    away = (
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
    return isinstance(reason, kafka) and (reason.retriable() or reason.code() in away)


def patiently(call: Callable[[], T], patience: float = BROKER_S) -> T:
    """Return what a call returns; it is made again while the broker is away."""
    give_up = time.monotonic() + patience
    while True:
        try:
            return call()
        except confluent_kafka().KafkaException as error:
            if not is_passing(error) or time.monotonic() > give_up:
                raise
        time.sleep(BROKER_PAUSE_S)


@functools.lru_cache(maxsize=64)
def consumer_of(settings: tuple[tuple[str, str], ...], group: str) -> Any:
    """The consumer of this process with these settings; it never commits by itself."""
    return confluent_kafka().Consumer(
        {
            "enable.auto.commit": "false",
            "auto.offset.reset": "error",
            "enable.partition.eof": "true",
            "isolation.level": "read_committed",
            "reconnect.backoff.ms": "500",  # each attempt leaves a line on stderr
            **dict(settings),
            "group.id": group,
        }
    )


def partitions_of(consumer: Consumer, topics: list[str]) -> list[tuple[str, int]]:
    """Names and numbers of the partitions of topics, which must exist."""

    def ask() -> list[tuple[str, int]]:
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

    return patiently(ask)


def ends_of(consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
    """The first offset that a partition has, and the one after its last."""
    place = confluent_kafka().TopicPartition(topic, partition)
    return patiently(
        lambda: consumer.get_watermark_offsets(place, timeout=BROKER_CALL_S, cached=False)
    )
