"""Modules of BigDL name the install command for missing packages."""

import importlib
import json
import subprocess
import sys

import missing_packages
import pytest

from bigdl.common.dropped import explain_imports
from bigdl.common.errors import MissingExtraError
from bigdl.common.missing import PACKAGES

_FAST = ["torch"]
_NEEDED = ["tensorflow", "PIL", "numpy"]  # by others, and imported without them those are not whole
_REST = sorted({*PACKAGES} - {*_FAST, *_NEEDED, "google.protobuf"})


@pytest.mark.parametrize(
    "packages",
    [
        _FAST,
        pytest.param([*_REST, *_NEEDED], marks=pytest.mark.slow),
    ],
    ids=["torch", "all"],
)
def test_every_public_module_imports_or_names_the_extra(packages):
    done = subprocess.run(
        [sys.executable, missing_packages.__file__, *packages],
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    lines = [line[8:] for line in done.stdout.splitlines() if line.startswith("MISSING ")]
    actual = {package: (explained, wrong) for package, explained, wrong in map(json.loads, lines)}
    assert list(actual) == packages
    assert {name: wrong for name, (_, wrong) in actual.items() if wrong} == {}
    assert actual.get("torch", (30,))[0] >= 30


def test_the_public_modules_are_found():
    modules = missing_packages.public_modules()
    assert {"bigdl.orca", "bigdl.orca.learn.pytorch", "bigdl.nano.pytorch.trainer"} < {*modules}
    assert len(modules) > 100


@pytest.fixture
def without(monkeypatch):
    """Return a function that hides an installed package and returns the test's monkeypatch."""
    missing = missing_packages.Installed()

    def take_out(package, importer, text):
        explain_imports()
        missing.missing = package
        monkeypatch.setattr(
            sys,
            "meta_path",
            [missing if e is missing_packages.PathFinder else e for e in sys.meta_path],
        )
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
            monkeypatch.delitem(sys.modules, name)
        return exec(text, {"__name__": importer})

    return take_out


@pytest.mark.parametrize(
    ("package", "importer", "extra"),
    [
        ("yaml", "bigdl.nano.tf.keras.models", "nano,tf"),
        ("yaml", "bigdl.nano.pytorch.trainer", "nano"),
        ("yaml", "bigdl.nano.serving.server", "serving"),
        ("yaml", "bigdl.friesian.serving", "serving"),
        ("optuna", "bigdl.orca.automl.auto_estimator", "automl"),
        ("optuna", "bigdl.tuning.study", "nano"),
        ("xgboost", "bigdl.orca.automl.xgboost", "xgboost"),
        ("tf2onnx", "bigdl.orca.learn.tf2", "tf"),
    ],
)
def test_the_extra_is_that_of_the_room_which_imports(without, package, importer, extra):
    with pytest.raises(MissingExtraError) as error:
        without(package, importer, f"import {package}")
    assert str(error.value) == (
        f"{PACKAGES[package]} is not installed; run: pip install 'bigdl[{extra}]'"
    )
    assert isinstance(error.value, ModuleNotFoundError)
    assert error.value.name == package


@pytest.mark.parametrize("importer", ["a_program", "__main__", "bigdlike"])
def test_the_import_of_a_program_stays_as_it_is(without, importer):
    with pytest.raises(ModuleNotFoundError) as error:
        without("xgboost", importer, "import xgboost")
    assert not isinstance(error.value, MissingExtraError)


def test_whether_a_package_is_there_may_be_asked(without):
    text = "import importlib.util\nassert importlib.util.find_spec('xgboost') is None"
    without("xgboost", "bigdl.orca.automl.xgboost", text)


def test_a_package_of_a_finder_that_came_later_is_found(without, monkeypatch):
    class Later:
        @staticmethod
        def find_spec(fullname, path=None, target=None):
            actual = importlib.machinery.ModuleSpec("xgboost", None, is_package=True)
            return actual if fullname == "xgboost" else None

    explain_imports()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path, Later])
    without("xgboost", "bigdl.orca.automl.xgboost", "import xgboost")
