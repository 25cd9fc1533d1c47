#!/usr/bin/env python3
"""Count files and lines of code, without docstrings, comments and blank lines.

python scripts/count_code.py            # one line a room of src/bigdl, and the sum
python scripts/count_code.py --files    # one line a file
python scripts/count_code.py PATH ...   # of other folders or files
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src" / "bigdl"
NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(text: str) -> int:
    """Return the number of lines of code in `text`."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            value = first.value if isinstance(first, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                lines.difference_update(range(value.lineno, (value.end_lineno or 0) + 1))
    return len(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="*", type=Path, help="folders or files, src/bigdl if none")
    parser.add_argument("--files", action="store_true", help="one line a file")
    options = parser.parse_args()
    counts = {}
    for path in options.paths or [SOURCE]:
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            counts[file.resolve()] = code_lines(file.read_text())
    if options.files:
        for file, lines in counts.items():
            print(f"{lines:7,d}  {file}")
    else:
        files, lines = Counter(), Counter()
        for file, count in counts.items():
            room = (
                "/".join(file.relative_to(SOURCE).parts[:-1][:2]) if SOURCE in file.parents else "."
            )
            files[room] += 1
            lines[room] += count
        for room in sorted(lines):
            print(f"{files[room]:5d} files {lines[room]:7,d} lines  {room}")
    print(f"{len(counts):5d} files {sum(counts.values()):7,d} lines  in all")


if __name__ == "__main__":
    main()
