"""Count the functions of ``src/bigdl`` that return or take Any, by package.

An annotation counts that is Any as a whole: a reader, and an editor, know nothing of the value. The
signature of a public function then has a comment about it; its docstring may describe a parameter.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield the package and the node of every function."""
    for path in sorted((SRC / "bigdl").rglob("*.py")):
        room = "/".join(path.relative_to(SRC / "bigdl").parts[:2])
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield room, node


def is_any(annotation: ast.expr | None) -> bool:
    """Return True if an annotation is exactly Any."""
    return isinstance(annotation, ast.Name) and annotation.id == "Any"


def count() -> tuple[Counter[str], Counter[str]]:
    """Return the numbers of Any results and parameters, by package."""
    results: Counter[str] = Counter()
    parameters: Counter[str] = Counter()
    for room, node in functions():
        results[room] += is_any(node.returns)
        parameters[room] += sum(is_any(each.annotation) for each in _parameters(node))
    return results, parameters


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return every + [each for each in (node.args.vararg, node.args.kwarg) if each is not None]


def undescribed() -> list[str]:
    """Return the public functions that do not say what an Any of their signature is."""
    names = []
    for path in sorted((SRC / "bigdl").rglob("*.py")):
        lines, file = path.read_text(encoding="utf-8").splitlines(), path.relative_to(SRC)
        if not any(part.startswith("_") and part != "__init__.py" for part in file.parts):
            members = _public_functions(ast.parse("\n".join(lines)), "")
            names += [f"{file}: {name}" for name, *each in members if _is_undescribed(lines, *each)]
    return names


def _public_functions(
    tree: ast.Module | ast.ClassDef, docstring: str
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    """Yield name, node and docstrings, including that of the class, of public functions."""
    for node in ast.iter_child_nodes(tree):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not (is_function or isinstance(node, ast.ClassDef)):
            continue
        if node.name.startswith("_") and not node.name.startswith("__"):
            continue
        described = f"{ast.get_docstring(node) or ''}\n{docstring}"
        if is_function:
            yield node.name, node, described
        else:
            for name, *each in _public_functions(node, described):
                yield f"{node.name}.{name}", *each


def _is_undescribed(
    lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef, docstring: str
) -> bool:
    """Return True if neither a comment nor the docstring says what an Any of a function is."""
    names = [each.arg for each in _parameters(node) if is_any(each.annotation)]
    is_described = all(re.search(rf"\b{name}\b", docstring) for name in names)
    last = max(node.body[0].lineno - 1, getattr(node.returns, "end_lineno", node.lineno))
    signature = lines[node.lineno - 1 : last]
    has_comment = any("#" in line for line in signature)
    return not has_comment and (is_any(node.returns) or not is_described)


def main() -> None:
    """Print a table of the packages, in descending order."""
    results, parameters = count()
    print(f"{results.total():>8} {parameters.total():>10}  all")
    print(f"{'results':>8} {'parameters':>10}  room")
    for room in sorted(results, key=lambda each: -results[each] - parameters[each]):
        if results[room] or parameters[room]:
            print(f"{results[room]:>8} {parameters[room]:>10}  {room}")


if __name__ == "__main__":
    main()
