"""The wheel contains all of ``src``, and names the install commands of its extras."""

import datetime
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = ["cloudpickle", "packaging"]

# What a user types, and the extra that the error must name.
NEEDS_AN_EXTRA = [
    ("from bigdl.orca import init_orca_context; init_orca_context()", "orca"),
]


def run(*command: str | Path, cwd: Path | None = None) -> str:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """Copy the release files to a temporary folder, so that builds leave no files in the tree."""
    copy = tmp_path_factory.mktemp("source")
    for name in ["setup.py", "pyproject.toml", "README.md", "LICENSE"]:
        shutil.copy(ROOT / name, copy)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def wheel(source) -> Path:
    pip = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    run(*pip, "--wheel-dir", source / "dist", source)
    (path,) = (source / "dist").glob("bigdl-*.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def bare_python(wheel, tmp_path_factory) -> Path:
    """Return the interpreter of an environment with BigDL and its hard requirements only."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel)
    (site_packages,) = home.glob("lib/python*/site-packages")
    for name in REQUIRED:  # pure Python; copied, so that the test needs no network
        (package,) = importlib.util.find_spec(name).submodule_search_locations
        shutil.copytree(package, site_packages / name)
    return python


def check_that_missing_extras_are_named(python: Path, cwd: Path) -> None:
    # From an empty directory, so that no import can find the working tree.
    run(python, "-c", "import bigdl.orca", cwd=cwd)
    for statement, extra in NEEDS_AN_EXTRA:
        code = (
            "from bigdl.common.errors import MissingExtraError\n"
            f"try:\n    {statement}\nexcept MissingExtraError as error:\n    print(error)"
        )
        assert f"pip install 'bigdl[{extra}]'" in run(python, "-c", code, cwd=cwd)


def test_wheel_holds_every_module_and_no_more(source, wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = set(archive.namelist())
    in_wheel = {
        name for name in files if ".dist-info/" not in name and ".data/scripts/" not in name
    }
    in_source = {
        path.relative_to(source / "src").as_posix()
        for pattern in ("*.py", "py.typed", "log4j2.properties", "*.proto", "*.binpb", "*.yaml")
        for path in (source / "src/bigdl").rglob(pattern)
    }
    assert in_wheel == in_source
    assert any(name.endswith("licenses/LICENSE") for name in files)


def test_metadata_is_lean_and_names_the_extras(metadata):
    hard = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert [line.partition(">")[0] for line in hard] == REQUIRED
    extras = {
        "orca",
        "orca-core",
        "data",
        "java",
        "ray",
        "nano",
        "inc",
        "elasticsearch",
        "connect",
        "encryption",
        "delta",
        "iceberg",
        "kafka",
        "mlflow",
        "tf",
        "jax",
        "llm",
        "langchain",
        "friesian",
        "serving",
        "serving-ray",
        "automl",
        "xgboost",
        "lightgbm",
        "all",
        "dev",
        "docs",
    }
    assert set(metadata.get_all("Provides-Extra")) == extras
    checked = runpy.run_path(str(ROOT / "scripts" / "check_release.py"))
    assert {*checked["IMPORTS"], *checked["FOR_DEVELOPERS"]} == {"", *extras}
    assert metadata["License-Expression"] == "Apache-2.0"


def test_changelog_begins_with_what_is_unreleased_and_this_version(metadata):
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    (unreleased, newest, *_) = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert unreleased == "[Unreleased]"
    version, date = re.fullmatch(r"\[(.+)\] - (.+)", newest).groups()
    assert Version(metadata["Version"]).is_devrelease or metadata["Version"] == version
    assert datetime.date.fromisoformat(date)
    names = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert names <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_tested_versions_are_those_that_users_may_have(metadata):
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    pins = {name.lower().replace("_", "-"): version for name, version in pins.items()}
    for requirement in map(Requirement, metadata.get_all("Requires-Dist")):
        version = pins[requirement.name.lower().replace("_", "-")]
        assert requirement.specifier.contains(version, prereleases=True), requirement


@pytest.mark.slow
def test_bare_install_names_the_missing_extra(bare_python, tmp_path):
    check_that_missing_extras_are_named(bare_python, tmp_path)


@pytest.mark.slow
def test_release_installs_from_source_archive_with_its_requirements(source, tmp_path):
    """Build a wheel from an sdist and install it with its hard requirements."""
    run(sys.executable, "-m", "build", "--outdir", tmp_path / "dist", source)
    (archive,) = (tmp_path / "dist").glob("bigdl-*.tar.gz")
    assert list((tmp_path / "dist").glob("bigdl-*.whl"))
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    run(python, "-m", "pip", "install", "-c", ROOT / "constraints.txt", archive)
    installed = run(python, "-m", "pip", "list", "--format=freeze").lower()
    assert all(name in installed for name in REQUIRED)
    assert "torch" not in installed
    assert "pyspark" not in installed
    check_that_missing_extras_are_named(python, tmp_path)
