"""Errors for dropped modules of BigDL 2.x name their replacements."""

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused

import bigdl.dllib
import bigdl.orca  # noqa: F401
from bigdl.common.dropped import DROPPED, DroppedModuleError
from bigdl.common.errors import UsageError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "compat.md"


@pytest.mark.parametrize("name", DROPPED)
def test_a_dropped_module_names_its_replacement(name):
    with pytest.raises(ImportError, match=f"^{name} is no longer available: .*; use .*") as caught:
        importlib.import_module(f"{name}.anything")
    assert isinstance(caught.value, DroppedModuleError)
    assert f"`{name}" in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("name", [name for name in DROPPED if name.count(".") == 1])
def test_a_dropped_package_tells_it_as_the_first_import_of_a_program(name):
    program = f"from {name}.anything import Something"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert re.search(f"DroppedModuleError: {name} is no longer .*; use ", done.stderr)


def test_the_parts_that_they_use_instead_are_there():
    for _, instead in DROPPED.values():
        for name in re.findall(r"bigdl(?:\.\w+)+", instead):
            importlib.import_module(name)


def test_a_name_taken_from_a_package_that_is_there_tells_it_too():
    with refused("name-dropped"):
        from bigdl.dllib import keras  # noqa: F401


def test_a_misspelt_module_is_only_missing():
    with pytest.raises(ModuleNotFoundError, match="No module named") as caught:
        importlib.import_module("bigdl.orca.lern")
    assert not isinstance(caught.value, DroppedModuleError)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("bigdl.dllib.utils.common", "JTensor"),
        ("bigdl.dllib.nn.layer", "LookupTable"),
        ("bigdl.dllib.feature.common", "FeatureSet"),
    ],
)
def test_a_dropped_name_is_missing_to_every_way_of_asking(module, name):
    imported = importlib.import_module(module)
    assert not hasattr(imported, name)
    assert getattr(imported, name, None) is None
    sentence = f"{module}.{name} is no longer available: .*; "
    with pytest.raises(AttributeError, match=sentence) as read:
        getattr(imported, name)
    assert isinstance(read.value, UsageError)
    with pytest.raises(ImportError, match=sentence) as taken:
        exec(f"from {module} import {name}", {})
    assert isinstance(taken.value, UsageError)
    with pytest.raises(AttributeError, match="has no attribute 'Misspelt'"):
        imported.Misspelt  # noqa: B018
