"""One messy table for the tests of all operators, and a certificate for those of servers."""

import subprocess

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


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Certificate and key of this machine, as files."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return str(folder / "cert.pem"), str(folder / "key.pem")
