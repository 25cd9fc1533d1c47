"""Imports point one way: common <- runtime <- training, tuning <- orca.

``nano`` stands on the rooms below ``orca``, ``friesian`` on them and public names of ``orca``,
and only ``orca.learn`` and ``orca.inference`` may call ``nano``.  What Estimators share knows of no
framework, and none imports from another's.  An import inside a function counts like one at the top.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"

BELOW_ORCA = ["bigdl.common", "bigdl.runtime", "bigdl.training", "bigdl.tuning"]
BELOW_LEARN = {
    "may": [*BELOW_ORCA, "bigdl.orca"],
    "never": ["bigdl.orca.learn", "bigdl.orca.automl"],
}


def part_of_learn(*others: str) -> dict[str, list[str]]:
    """What an Estimator may import, but for those of other frameworks."""
    return {
        "may": [*BELOW_ORCA, "bigdl.orca", "bigdl.nano"],
        "never": ["bigdl.orca.automl", *others],
    }


# The longest matching name is the layer of a module.
LAYERS = {
    "bigdl.common": {"may": ["bigdl.common"]},
    "bigdl.runtime": {"may": ["bigdl.common", "bigdl.runtime"]},
    "bigdl.training": {"may": ["bigdl.common", "bigdl.runtime", "bigdl.training"]},
    "bigdl.tuning": {"may": ["bigdl.common", "bigdl.runtime", "bigdl.tuning"]},
    "bigdl.orca.cluster": BELOW_LEARN,
    "bigdl.orca.data": BELOW_LEARN,
    "bigdl.orca.engine": BELOW_LEARN,
    "bigdl.orca.engines": BELOW_LEARN,
    "bigdl.orca.parameter_layer": BELOW_LEARN,
    "bigdl.orca.learn": part_of_learn("bigdl.orca.learn.pytorch", "bigdl.orca.learn.tf2"),
    "bigdl.orca.learn.nnframes": part_of_learn("bigdl.orca.learn.tf2"),
    "bigdl.orca.learn.pytorch": part_of_learn("bigdl.orca.learn.tf2"),
    "bigdl.orca.learn.tf2": part_of_learn("bigdl.orca.learn.pytorch"),
    "bigdl.orca.inference": {
        "may": [*BELOW_ORCA, "bigdl.orca", "bigdl.nano"],
        "never": ["bigdl.orca.learn", "bigdl.orca.automl"],
    },
    "bigdl.orca": {"may": [*BELOW_ORCA, "bigdl.orca"]},
    "bigdl.nano": {"may": [*BELOW_ORCA, "bigdl.nano"]},
    "bigdl.friesian": {
        "may": [*BELOW_ORCA, "bigdl.orca", "bigdl.friesian"],
        "public_only": True,
    },
    "bigdl.dllib": {"may": [*BELOW_ORCA, "bigdl.orca", "bigdl.dllib"]},
}


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names that a module imports; `package` is the one that its relative imports mean."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                yield base
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__" | "require")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def wrong_imports(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """The imports of one module that point the wrong way."""
    layer = max((name for name in LAYERS if is_in(module, name)), key=len)
    rule = LAYERS[layer]
    package = module if is_package else module.rpartition(".")[0]
    found = []
    for name in imported(ast.parse(source), package):
        if not is_in(name, "bigdl") or name == "bigdl":
            continue
        allowed = any(is_in(name, each) for each in rule["may"])
        refused = any(is_in(name, each) for each in rule.get("never", []))
        private = rule.get("public_only", False) and not is_in(name, layer) and "._" in name
        if refused or private or not allowed:
            found.append(name)
    return found


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted((SRC / "bigdl").rglob("*.py")):
        parts = path.relative_to(SRC).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_every_module_belongs_to_a_layer():
    strays = [name for name, _ in modules() if not any(is_in(name, each) for each in LAYERS)]
    assert strays == []


def test_bigdl_is_a_namespace_without_init():
    assert not (SRC / "bigdl" / "__init__.py").exists()


def test_imports_point_one_way():
    wrong = {
        name: found
        for name, path in modules()
        if (
            found := wrong_imports(
                path.read_text(encoding="utf-8"), name, is_package=path.stem == "__init__"
            )
        )
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bigdl.common.cpu", "import bigdl.orca"),
        ("bigdl.orca.engines.spark", "from bigdl.orca import learn"),
        ("bigdl.orca.engines.spark", "from ..learn.metrics import Accuracy"),
        ("bigdl.runtime.collectives.base", "def f():\n    import bigdl.orca.automl.hp"),
        ("bigdl.orca.data.shard", "importlib.import_module('bigdl.orca.learn')"),
        ("bigdl.orca.learn.metrics", "from bigdl.orca.automl import hp"),
        ("bigdl.training.fit", "from bigdl.orca.learn.pytorch.loop import FitProgram"),
        ("bigdl.orca.learn.tf2.parts", "from bigdl.orca.learn.pytorch import Estimator"),
        ("bigdl.orca.cluster.spark", "from bigdl.nano.pytorch import Trainer"),
        ("bigdl.nano.pytorch", "from bigdl.orca import init_orca_context"),
        ("bigdl.friesian.feature", "from bigdl.orca.data import _internal"),
        ("bigdl.orca.context", "import bigdl.friesian"),
    ],
)
def test_a_wrong_import_is_found(module, source):
    assert wrong_imports(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bigdl.common.cpu", "from bigdl.common.errors import UsageError\nimport os"),
        ("bigdl.orca.learn.estimator", "from bigdl.nano.pytorch import InferenceOptimizer"),
        ("bigdl.orca.learn.estimator", "from ..engine import SparkEngine"),
        ("bigdl.friesian.feature", "from bigdl.orca import OrcaContext"),
        ("bigdl.friesian.feature", "from . import _plans"),
    ],
)
def test_a_right_import_passes(module, source):
    assert wrong_imports(source, module) == []


def test_import_of_orca_is_light():
    heavy = ["torch", "pyspark", "tensorflow", "ray", "pandas", "pyarrow"]
    code = f"import sys, bigdl.orca; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
