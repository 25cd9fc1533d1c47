"""Topics of Kafka as a streaming DataFrame."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_choice, check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.cluster.connect import active_spark
from bigdl.orca.data.kafka.client import confluent_kafka, settings_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


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
    starting : {"earliest", "latest"}
        Where a query without a checkpoint begins.
    most_records : int, optional
        Most records of a micro-batch, which bounds memory where records come faster than they are
        answered; they wait in Kafka then. Without the JAR of the connector it takes Spark 4.2.
    connector : {"auto", "spark", "python"}
        ``"spark"`` is Spark's own connector, whose JAR the session must have
        (``spark.jars.packages``). ``"python"`` is a data source of Spark 4 over confluent-kafka
        (extra ``kafka``). ``"auto"`` takes the first if it is there.
    options : dict of str to str, optional
        Settings of the client, such as ``{"security.protocol": "SSL"}``.

    Returns
    -------
    pyspark.sql.DataFrame
        With key and value (binary), topic, partition, offset and timestamp.

    Examples
    --------
    >>> from bigdl.common.errors import UsageError
    >>> from bigdl.orca.data.kafka import read_kafka
    >>> try:
    ...     read_kafka("broker:9092", [])
    ... except UsageError as error:
    ...     print(error)
    topics must name a topic of Kafka, or several, got []
    """
    names = [topics] if isinstance(topics, str) else list(topics)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise UsageError(
            f"topics must name a topic of Kafka, or several, got {topics!r}",
            code="argument-value",
            argument="topics",
        )
    check_choice("starting", starting, ("earliest", "latest"))
    check_choice("connector", connector, ("auto", "spark", "python"))
    settings = settings_of(servers, options)
    given = {f"kafka.{key}": value for key, value in settings.items()}
    given |= {"subscribe": ",".join(names), "startingOffsets": starting}
    if most_records is not None:
        given["maxOffsetsPerTrigger"] = str(check_positive("most_records", most_records))
    spark = active_spark().spark
    stream: Any = None
    if connector != "python":
        stream = _by_jar(spark, given, connector == "auto")
    if stream is None:
        if not hasattr(spark, "dataSource"):
            raise UsageError(
                'connector="python" needs Spark 4, whose data sources may be of Python; leave it '
                "out and start the session with Spark's own connector",
                code="version-unsupported",
                argument="connector",
                package="pyspark",
            )
        confluent_kafka()
        from bigdl.orca.data.kafka.source import NAME, KafkaDataSource

        spark.dataSource.register(KafkaDataSource)
        stream = spark.readStream.format(NAME).options(**given).load()
    return stream.select("key", "value", "topic", "partition", "offset", "timestamp")


def _by_jar(spark: Any, options: dict[str, str], may_miss: bool) -> DataFrame | None:
    """The stream by Spark's connector; None where its JAR is not there."""
    from pyspark.errors import AnalysisException

    try:
        return spark.readStream.format("kafka").options(**options).load()
    except AnalysisException as error:
        if not re.search("Failed to find (the )?data source", str(error)):
            raise
    if may_miss and hasattr(spark, "dataSource"):
        return None
    raise UsageError(
        "The session has no connector to Kafka; start it with spark.jars.packages="
        "org.apache.spark:spark-sql-kafka-0-10_2.13:<version of Spark>, or with Spark 4 and "
        'connector="python"',
        code="package-missing",
        package="org.apache.spark:spark-sql-kafka-0-10_2.13",
    )
