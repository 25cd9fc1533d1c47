"""One messy table for the tests of all operators."""

import pytest
from table_reference import SCHEMA, messy_rows


@pytest.fixture(scope="module")
def rows():
    return messy_rows(60, seed=4)


@pytest.fixture(scope="module")
def messy(orca_spark, rows):
    """A FeatureTable of `rows` in two partitions."""
    from bigdl.friesian.feature import FeatureTable

    return FeatureTable(orca_spark.createDataFrame(rows, SCHEMA).coalesce(2).cache())


@pytest.fixture(scope="module")
def make(orca_spark):
    """A function that makes a FeatureTable of rows and a schema."""
    from bigdl.friesian.feature import FeatureTable

    return lambda rows, schema: FeatureTable(orca_spark.createDataFrame(rows, schema).coalesce(2))
