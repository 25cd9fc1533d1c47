"""Count the functions of ``src/bigdl`` that return or take Any, by package.

An annotation counts that is Any as a whole: a reader, and an editor, know nothing of the value.
"""

import ast
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
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        every += [each for each in (node.args.vararg, node.args.kwarg) if each is not None]
        results[room] += is_any(node.returns)
        parameters[room] += sum(is_any(each.annotation) for each in every)
    return results, parameters


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
