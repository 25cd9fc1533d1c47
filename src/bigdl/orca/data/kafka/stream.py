"""Kafka topics as a streaming DataFrame."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.data.kafka.client import confluent_kafka, settings_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def read_kafka(
    servers: str,
    topics: str | list[str],
    *,
    starting: str = "earliest",
    most_records: int | None = None,
    connector: str = "auto",
    options: dict[str, str] | None = None,
) -> DataFrame:
    """Return the records of topics as a streaming DataFrame.

    Parameters
    ----------
    servers : str
        Addresses of brokers, ``"host:port,host:port"``.
    topics : str or list of str
        Topics to read.
    starting : {"earliest", "latest"}
        Start position of a query without a checkpoint.
    most_records : int, optional
        Maximum records per micro-batch. It bounds memory if records arrive faster than they are
        processed; the others wait in Kafka. Without the connector's JAR it needs Spark 4.2.
    connector : {"auto", "spark", "python"}
        ``"spark"`` is Spark's Kafka connector, whose JAR the session must have
        (``spark.jars.packages``). ``"python"`` is a Python data source for Spark 4 that uses
        confluent-kafka (extra ``kafka``). ``"auto"`` prefers the first if its JAR is available.
    options : dict of str to str, optional
        Client settings, such as ``{"security.protocol": "SSL"}``.

    Returns
    -------
    pyspark.sql.DataFrame
        Columns key and value (binary), topic, partition, offset and timestamp.

    Examples
    --------
    >>> from bigdl.common.errors import UsageError
    >>> from bigdl.orca.data.kafka import read_kafka
    >>> try:
    ...     read_kafka("broker:9092", [])
    ... except UsageError as error:
    ...     print(error)
    topics must name one or more Kafka topics, got []
    """
    names = [topics] if isinstance(topics, str) else list(topics)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(
            f"topics must name one or more Kafka topics, got {topics!r}",
            code="argument-value",
            argument="topics",
        )
    check_choice("starting", starting, ("earliest", "latest"))
    check_choice("connector", connector, ("auto", "spark", "python"))
    settings = settings_of(servers, options)
    source_options = {f"kafka.{key}": value for key, value in settings.items()}
    source_options |= {"subscribe": ",".join(names), "startingOffsets": starting}
    if most_records is not None:
        source_options["maxOffsetsPerTrigger"] = str(check_positive("most_records", most_records))
    spark = active_spark().spark
    stream: Any = None
    if connector != "python":
        stream = _load_with_connector(spark, source_options, connector == "auto")
    if stream is None:
        if not hasattr(spark, "dataSource"):
            raise UsageError(
                'connector="python" needs Spark 4, which supports Python data sources; omit it '
                "and start the session with Spark's Kafka connector",
                code="version-unsupported",
                argument="connector",
                package="pyspark",
            )
        confluent_kafka()
        from bigdl.orca.data.kafka.source import NAME, KafkaDataSource

        spark.dataSource.register(KafkaDataSource)
        stream = spark.readStream.format(NAME).options(**source_options).load()
    return stream.select("key", "value", "topic", "partition", "offset", "timestamp")


def _load_with_connector(
    spark: SparkSession, options: dict[str, str], is_optional: bool
) -> DataFrame | None:
    """Load the stream with Spark's connector; return None if its JAR is missing."""
    from pyspark.errors import AnalysisException

    try:
        return spark.readStream.format("kafka").options(**options).load()
    except AnalysisException as error:
        if not re.search("Failed to find (the )?data source", str(error)):
            raise
    if is_optional and hasattr(spark, "dataSource"):
        return None
    raise UsageError(
        "The session has no Kafka connector; start it with spark.jars.packages="
        "org.apache.spark:spark-sql-kafka-0-10_2.13:<version of Spark>, or with Spark 4 and "
        'connector="python"',
        code="package-missing",
        package="org.apache.spark:spark-sql-kafka-0-10_2.13",
    )
