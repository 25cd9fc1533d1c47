"""Imports point one way: from each package to those above it in ``ROOMS``, without cycles.

An import inside a function counts like one at the top; one for type checking does not.
"""

import ast
import functools
import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"

# In this order; rooms of one line may import each other. The longest matching name is the room of
# a module.
ROOMS = [
    ["bigdl.common"],
    ["bigdl.runtime"],
    ["bigdl.training", "bigdl.data"],
    ["bigdl.tuning"],
    ["bigdl.nano.lazy_names", "bigdl.nano.attribute_patch"],
    ["bigdl.nano.acceleration"],
    ["bigdl.nano.openvino"],
    ["bigdl.nano.runtime"],
    ["bigdl.nano.searchable"],
    ["bigdl.nano.searching"],
    ["bigdl.nano.pytorch"],
    ["bigdl.nano.tf"],
    ["bigdl.nano.automl"],
    ["bigdl.nano.utils"],
    ["bigdl.nano.serving"],
    ["bigdl.nano"],
    ["bigdl.orca.cluster"],
    ["bigdl.orca.arguments"],
    ["bigdl.orca.settings"],
    ["bigdl.orca.context"],
    ["bigdl.orca.ray"],
    ["bigdl.orca.data"],
    ["bigdl.orca.engines", "bigdl.orca.engine"],
    ["bigdl.orca.parameter_layer"],
    ["bigdl.orca.inference"],
    ["bigdl.orca.learn.metrics"],
    ["bigdl.orca.learn.prediction"],
    ["bigdl.orca.learn"],
    ["bigdl.orca.learn.pytorch"],
    ["bigdl.orca.learn.nnframes"],
    ["bigdl.orca.learn.tf2"],
    ["bigdl.orca.learn.trees"],
    ["bigdl.orca.automl"],
    ["bigdl.orca"],
    ["bigdl.mlflow"],
    ["bigdl.llm"],
    ["bigdl.friesian.ops"],
    ["bigdl.friesian.executors"],
    ["bigdl.friesian.metrics"],
    ["bigdl.friesian.feature"],
    ["bigdl.friesian.models"],
    ["bigdl.friesian.serving"],
    ["bigdl.friesian"],
    ["bigdl.dllib"],
    ["bigdl.chronos", "bigdl.ppml", "bigdl.serving"],
    ["bigdl.testing"],
    ["bigdl.demo"],
    ["bigdl.cli"],
]
PLACE = {name: number for number, names in enumerate(ROOMS) for name in names}

# What stands above a room and is not for it, all the same.
NEVER = {
    "bigdl.orca": ["bigdl.nano"],
    "bigdl.orca.learn.nnframes": ["bigdl.orca.learn.tf2"],
    "bigdl.orca.learn.tf2": ["bigdl.orca.learn.pytorch", "bigdl.orca.learn.nnframes"],
    "bigdl.friesian": ["bigdl.nano"],
    "bigdl.dllib": ["bigdl.nano", "bigdl.friesian"],
}
# The rooms that call Nano, which accelerates their models.
CALL_NANO = [
    "bigdl.orca.learn",
    "bigdl.orca.inference",
    "bigdl.orca.automl",
    "bigdl.friesian.serving",
]


def is_in(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_module(name: str) -> bool:
    path = SRC.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def imported(tree: ast.AST, package: str, *, types: bool = False) -> Iterator[str]:
    """Return the dotted names that a module imports; `package` resolves relative imports.

    Those for type checking only with `types`.
    """
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only and not types:
            continue
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                    base = ".".join([*parents, base] if base else parents)
                names = [f"{base}.{alias.name}" for alias in node.names if alias.name != "*"]
                modules_of_it = [name for name in names if is_module(name)]
                if len(modules_of_it) < len(names) or not names:
                    yield base
                yield from names
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__" | "require")
                | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def room_of(module: str) -> str | None:
    return max((name for name in PLACE if is_in(module, name)), key=len, default=None)


@functools.cache
def tree_of(path: Path) -> ast.Module:
    gc.disable()  # it would look at all trees again and again
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    finally:
        gc.freeze()
        gc.enable()


def wrong_imports(tree: ast.AST, module: str, *, is_package: bool = False) -> list[str]:
    """Return the imports of one module that point the wrong way."""
    index = PLACE[room_of(module)]
    refused = [name for room, names in NEVER.items() if is_in(module, room) for name in names]
    if any(is_in(module, name) for name in CALL_NANO):
        refused = [name for name in refused if name != "bigdl.nano"]
    package = module if is_package else module.rpartition(".")[0]
    wrong = []
    for name in imported(tree, package):
        if not is_in(name, "bigdl") or name == "bigdl":
            continue
        room = room_of(name)
        upward = room is None or PLACE[room] > index
        private = is_in(module, "bigdl.friesian") and not is_in(name, "bigdl.friesian")
        if upward or (private and "._" in name) or any(is_in(name, each) for each in refused):
            wrong.append(name)
    return wrong


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted({*(SRC / "bigdl").rglob("*.py")} - {SRC / "bigdl" / "__init__.py"}):
        parts = path.relative_to(SRC).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def test_every_module_belongs_to_a_room():
    strays = [name for name, _ in modules() if room_of(name) is None]
    assert strays == []


def test_docstrings_say_what_a_thing_is():
    """Check that docstrings do not begin like a question, such as "What it does"."""
    questions = [
        f"{name}: {doc.splitlines()[0]}"
        for name, path in modules()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and (doc := ast.get_docstring(node))
        and doc.split(maxsplit=1)[0] in ("What", "Whether", "How", "Why")
    ]
    assert questions == []


def test_bigdl_has_a_version_and_room_for_packages_of_other_distributions(tmp_path):
    other = tmp_path / "bigdl" / "of_another"
    other.mkdir(parents=True)
    (other.parent / "__init__.py").write_text(
        "__path__ = __import__('pkgutil').extend_path(__path__, __name__)\n"
    )
    (other / "__init__.py").touch()
    program = (
        "import bigdl, importlib.metadata, sys\n"
        "assert [name for name in sys.modules if name.startswith('bigdl.')] == []\n"
        "assert bigdl.__version__ == importlib.metadata.version('bigdl')\n"
        "assert not hasattr(bigdl, 'no_such_name')\n"
        "import bigdl.of_another, bigdl.common.errors\n"
    )
    path = {"PYTHONPATH": f"{SRC}:{tmp_path}"}
    subprocess.run([sys.executable, "-c", program], check=True, env={**os.environ, **path})


def test_imports_point_one_way():
    wrong = {
        name: actual
        for name, path in modules()
        if (actual := wrong_imports(tree_of(path), name, is_package=path.stem == "__init__"))
    }
    assert wrong == {}


def arrows(*, types: bool = False) -> dict[str, set[str]]:
    """Return the modules that each module imports, at the top or inside a function."""
    paths = dict(modules())
    graph = {}
    for name, path in paths.items():
        package = name if path.stem == "__init__" else name.rpartition(".")[0]
        tree = tree_of(path)
        targets = {
            each for each in imported(tree, package, types=types) if each in paths and each != name
        }
        # `from package import module` imports the module, not what the package itself imports
        packages = {p for p in targets if any(is_in(n, p) and n != p for n in targets)}
        graph[name] = targets - packages
    return graph


def between_rooms(graph: dict[str, set[str]], package: str) -> dict[str, set[str]]:
    """Return the arrows between the folders and modules that lie directly in a package."""
    depth = package.count(".") + 2
    rooms: dict[str, set[str]] = {}
    for name, targets in graph.items():
        room = ".".join(name.split(".")[:depth])
        if is_in(name, package) and name != package:
            inside = {".".join(t.split(".")[:depth]) for t in targets if is_in(t, package)}
            rooms.setdefault(room, set()).update(inside - {room, package})
    return rooms


def in_circles(graph: dict[str, set[str]]) -> set[str]:
    graph = {name: set(targets) for name, targets in graph.items()}
    while leaves := [name for name, targets in graph.items() if not targets]:
        for leaf in leaves:
            del graph[leaf]
        for targets in graph.values():
            targets.difference_update(leaves)
    return {name for name in graph if reaches(graph, name, name)}


def reaches(graph: dict[str, set[str]], start: str, goal: str) -> bool:
    seen, waiting = set(), [start]
    while waiting:
        for name in graph.get(waiting.pop(), ()):
            if name == goal:
                return True
            if name not in seen:
                seen.add(name)
                waiting.append(name)
    return False


def test_no_circle_between_files_or_between_rooms():
    graph = arrows()
    assert in_circles(graph) == set()
    packages = {name.rpartition(".")[0] for name in graph}
    circles = {package: in_circles(between_rooms(graph, package)) for package in packages}
    assert {package: rooms for package, rooms in circles.items() if rooms} == {}


CIRCLES_OF_TYPES = {
    # Some of XShards' factories return those on Ray.
    *("bigdl.orca.data.xshards.ray", "bigdl.orca.data.xshards.spark"),
    # A runner calls callbacks with itself.
    *("bigdl.orca.learn.pytorch.callbacks.base", "bigdl.orca.learn.pytorch.evaluation"),
    "bigdl.orca.learn.pytorch.parts",
    *("bigdl.orca.learn.pytorch.forward", "bigdl.orca.learn.pytorch.lightning"),
    # A factory of Estimators returns one of the language models above, which contains one.
    *("bigdl.llm.tuning", "bigdl.llm.tuning.estimator", "bigdl.orca.learn.pytorch.estimator"),
}
"""Modules that name each other in annotations only. Others must not join them."""


def test_no_file_imports_everything_from_two_modules():
    """mypy adds names of narrowed types to modules; two such names may clash."""
    for path in (SRC / "bigdl").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        stars = [n for n in nodes if isinstance(n, ast.ImportFrom) and n.names[0].name == "*"]
        assert len(stars) <= 1, path


def test_few_files_name_each_other_in_annotations():
    assert in_circles(arrows(types=True)) <= CIRCLES_OF_TYPES


def test_a_circle_is_found():
    graph = {
        "bigdl.nano.tf.models": {"bigdl.nano.pytorch.steps"},
        "bigdl.nano.pytorch.loop": {"bigdl.nano.tf.names"},
        "bigdl.nano.tf.names": set(),
        "bigdl.nano.pytorch.steps": set(),
    }
    assert in_circles(graph) == set()
    assert in_circles(between_rooms(graph, "bigdl.nano")) == {"bigdl.nano.tf", "bigdl.nano.pytorch"}
    graph["bigdl.nano.tf.names"] = {"bigdl.nano.tf.models", "bigdl.nano.pytorch.loop"}
    assert in_circles(graph) == {"bigdl.nano.tf.names", "bigdl.nano.pytorch.loop"}


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
        ("bigdl.orca.learn.tf2", "from bigdl.orca.learn.pytorch import Estimator"),
        ("bigdl.nano.acceleration.method", "from bigdl.nano.pytorch import Trainer"),
        ("bigdl.friesian.ops.cells", "from bigdl.friesian.feature import FeatureTable"),
        ("bigdl.orca.context", "import bigdl.friesian"),
    ],
)
def test_a_wrong_import_is_found(module, source):
    assert wrong_imports(ast.parse(source), module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("bigdl.common.cpu", "from bigdl.common.errors import UsageError\nimport os"),
        ("bigdl.orca.learn.estimator", "from bigdl.nano.pytorch import InferenceOptimizer"),
        ("bigdl.orca.learn.estimator", "from ..engine import SparkEngine"),
        ("bigdl.friesian.feature", "from bigdl.orca import OrcaContext"),
        ("bigdl.friesian.feature.table", "from . import storage"),
    ],
)
def test_a_right_import_passes(module, source):
    assert wrong_imports(ast.parse(source), module) == []


def test_import_of_orca_is_light():
    heavy = ["torch", "pyspark", "tensorflow", "ray", "pandas", "pyarrow"]
    code = f"import sys, bigdl.orca; print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


# What could run code when it is read --------------------------------------------------------

OF_THIS_RUN = {
    "friesian/executors/arrow.py",
    "nano/acceleration/search/isolation.py",
    "orca/automl/ray_workers.py",
}
"""They unpickle files that the same run wrote, in a folder of its own."""

ON_REQUEST = {
    "nano/pytorch/encryption.py",  # torch.load's own weights_only
    "nano/pytorch/inference/graphs.py",  # read_code
    "nano/serving/runners.py",
    "nano/tf/inference/accelerated.py",
    "orca/data/xshards/spark.py",
    "orca/inference/runtimes.py",
    "orca/learn/nnframes/stages.py",
    "orca/learn/pytorch/parts.py",
    "orca/learn/tf2/model_files.py",
    "runtime/serialization.py",
}
"""They read files of the user that can run code: with trust=True, or what the user's own programs
signed. SECURITY.md has a row for each."""

CONTRACTS = {"testing/engines.py", "testing/feeds.py", "testing/metrics.py", "testing/syncs.py"}
"""Published tests, which read what they wrote themselves a moment before."""

BETWEEN_PROCESSES = {
    "nano/pytorch/inference/pipeline.py",
    "nano/pytorch/training/processes.py",
    "nano/pytorch/training/shared_objects.py",
    "nano/tf/inference/optimizer.py",
    "nano/tf/serialization.py",
    "nano/tf/training/processes.py",
    "orca/cluster/connect.py",
    "orca/data/xshards/connect.py",
    "orca/data/lake_tables/scans.py",
    "orca/engines/connect.py",
    "orca/learn/horovod.py",
    "orca/learn/mxnet/program.py",
    "orca/inference/shipping.py",
    "orca/learn/pytorch/parameter_layer.py",
    "orca/parameter_layer/barrier.py",
    "orca/parameter_layer/shuffle.py",
    "runtime/failure.py",
    "runtime/keras_objects.py",
    "runtime/messages.py",
    "runtime/task.py",
    "training/batches.py",
    "training/keras/backends.py",
    "training/keras/data.py",
}
"""They unpickle bytes that the processes of one run send each other."""


def _unpicklers() -> set[str]:
    """Return the modules that call functions which can run code from their data."""
    return {
        str(path.relative_to(SRC / "bigdl"))
        for path in SRC.rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute | ast.Call) and _runs_code(node)
    }


_LOADERS = {
    *("Unpickler", "pickleFile", "read_pickle", "_unpickle_model"),
    *("aoti_load_package", "load_library", "register_custom_ops_library", "TFSMLayer"),
    *("enable_unsafe_deserialization", "exec_module"),
}


def _runs_code(node: ast.Attribute | ast.Call) -> bool:
    if isinstance(node, ast.Attribute):
        named = ast.unparse(node)
        is_loader = named.startswith(("pickle.load", "cloudpickle.load", "joblib.load"))
        return (
            is_loader
            or node.attr in _LOADERS
            or named in ("torch.jit.load", "torch.export.load", "tf.saved_model.load")
            or named.startswith(("marshal.load", "dill.load", "torch.package."))
        )
    keywords = {each.arg: ast.unparse(each.value) for each in node.keywords}
    named = ast.unparse(node.func)
    return (
        (named in ("torch.load", "_torch_load") and keywords.get("weights_only") != "True")
        or keywords.get("allow_pickle", "False") != "False"
        or keywords.get("safe_mode", "True") != "True"
        or "trust_remote_code" in keywords
        or named in ("eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load")
    )


def test_no_state_of_another_run_is_a_pickle():
    assert _unpicklers() == OF_THIS_RUN | ON_REQUEST | CONTRACTS | BETWEEN_PROCESSES
