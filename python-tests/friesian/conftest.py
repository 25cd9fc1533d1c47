"""Shared fixtures: a table with messy values, and a TLS certificate."""

import subprocess

import pytest
from table_reference import SCHEMA, messy_rows


@pytest.fixture(scope="module")
def rows():
    return messy_rows(60, seed=4)


@pytest.fixture(scope="module")
def messy(orca_spark, rows):
    """Build a FeatureTable of `rows` in two partitions."""
    from bigdl.friesian.feature import FeatureTable

    return FeatureTable(orca_spark.createDataFrame(rows, SCHEMA).coalesce(2).cache())


@pytest.fixture(scope="module")
def make(orca_spark):
    """Return a function that builds a FeatureTable from rows and a schema."""
    from bigdl.friesian.feature import FeatureTable

    return lambda rows, schema: FeatureTable(orca_spark.createDataFrame(rows, schema).coalesce(2))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Return the paths of a certificate and its key for this host."""
    folder = tmp_path_factory.mktemp("tls")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    command += ["-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem")]
    command += ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return str(folder / "cert.pem"), str(folder / "key.pem")
