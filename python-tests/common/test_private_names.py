"""Tests use no private names of BigDL."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
SOURCES = TESTS.parent / "src" / "bigdl"

# Of others, of BigDL 2.x, or without another way to be seen.
MAY_BE_READ = {
    "_active_spark_context": "PySpark's",
    "_buffers": "PyTorch's",
    "_exit": "of os",
    "_io": "execnet's",
    "_jvm": "PySpark's",
    "_repr_html_": "Jupyter's",
    "_replace": "of named tuples",
    "_avx2_checker": "a name of 2.x",
    "_avx512_checker": "a name of 2.x",
    "_bf16_checker": "a name of 2.x",
    "_eager_mode": "a setting of 2.x",
    "_flatten": "a name of 2.x",
    "_inc_checker": "a name of 2.x",
    "_ipex_checker": "a name of 2.x",
    "_is_installed": "a name of 2.x",
    "_onnxruntime_checker": "a name of 2.x",
    "_openvino_checker": "a name of 2.x",
    "_shard_size": "a setting of 2.x",
    "_values": "that a module of the user is left without it",
    "_http": "what a server holds of requests that it has not begun",
    "_server": "what a server holds of requests that it has not begun",
    "_features": "whether a recommender splits its model shows in its speed only",
    "_records": "trials as Optuna keeps them",
    "_shipped": "that a model is sent once shows in the time of a prediction only",
    "_shipped_fast": "that a model is converted once shows in the time of a prediction only",
    "_state": "that an index has taken in all shows in its speed only",
}


def private_of(module: ast.Module) -> set[str]:
    """Return the private names that a source module defines."""
    actual = set()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            actual.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            actual.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            actual.add(node.id)
    return {name for name in actual if name.startswith("_") and not name.startswith("__")}


def reads(module: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the private names, with lines, that a test reads from other objects than `self`."""
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            is_private = node.attr.startswith("_")  # ast.unparse is slow
            if is_private and ast.unparse(node.value) not in ("self", "cls", "super()"):
                yield node.lineno, node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bigdl"):
            yield from ((node.lineno, each.name) for each in node.names)
        elif isinstance(node, ast.Call) and called(node).endswith("attr"):
            for inputs in node.args[:2]:
                if isinstance(inputs, ast.Constant) and isinstance(inputs.value, str):
                    yield node.lineno, inputs.value.rpartition(".")[2]


def called(node: ast.Call) -> str:
    """Return the last part of the name of the called function."""
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def parsed(folder: Path) -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text("utf-8")) for path in sorted(folder.rglob("*.py"))}


def test_no_test_reads_a_private_name():
    private = set().union(*map(private_of, parsed(SOURCES).values()))
    actual, used = [], set()
    for path, module in parsed(TESTS).items():
        local = private_of(module)  # such as those of a class of the test
        for line, name in reads(module):
            if name in private - local and name not in MAY_BE_READ:
                actual.append(f"{path.relative_to(TESTS)}:{line}: {name}")
            used.add(name)
    assert actual == []
    assert set(MAY_BE_READ) - used == set()
