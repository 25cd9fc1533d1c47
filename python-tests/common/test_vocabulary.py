"""No word that docs/glossary.md bans is in names, docstrings, comments, messages or docs."""

import ast
import functools
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if "_build" not in page.parts),
]
MODULES = sorted((ROOT / "src").rglob("*.py"))

# Limits for rare words: in docstrings and comments of src, and in the pages.
RARE_IN_SOURCES, RARE_IN_PAGES = 25, 60

# Parameters, attributes and methods with a banned name that users or saved files depend on.
PUBLISHED: set[tuple[str, str]] = {  # (module, name)
    ("errors", "kind"),  # WorkerError
    ("errors", "place"),
    ("failure", "kind"),  # pickled
    ("keras_objects", "kind"),  # pickled
    ("columns", "kind"),  # ColumnSpec, pickled
    *((module, "kind") for module in ("feed", "in_memory", "loader", "parquet")),  # Feed
    *((module, "kind") for module in ("spark_dataframe", "xshards")),
    *((module, "kind") for module in ("cells", "column_types", "numbers")),  # Friesian
    *((module, "kind") for module in ("index", "operator", "rows")),
    ("rows", "found"),  # Features
    ("operators", "found"),  # assert_same_values
    ("split", "own"),  # SplitNetwork
    ("repository", "lease"),  # ModelRepository
}


def section(title: str) -> str:
    """Return the text of one section of the glossary."""
    return GLOSSARY.read_text(encoding="utf-8").split(f"\n## {title}\n")[1].split("\n## ")[0]


def first_column(title: str) -> list[str]:
    """Return the words between backticks in the first column of a section's table."""
    rows = re.findall(r"^\| (`.*?) \|", section(title), re.M)
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row)]


def as_pattern(words: list[str]) -> re.Pattern[str]:
    """Return a pattern of whole words, which may be separated by line breaks."""
    spaced = "|".join(re.escape(word).replace(r"\ ", r"\s+") for word in words)
    return re.compile(rf"(?<![\w.-])(?:{spaced})(?![\w-])", re.I)


BANNED = as_pattern(first_column("Words in text"))
RARE = as_pattern(first_column("Rare words"))
ALLOWED = as_pattern(re.findall(r"`([^`]+)`", section("Rare words").rsplit("\n\n", 1)[1]))
NAMES = set(first_column("Names"))


def prose(text: str) -> str:
    """Return a text without code: fenced blocks, literals between backticks and links' targets."""
    text = re.sub(r"^( *)(```+|:::+)(?!{).*?^\1\2", " ", text, flags=re.M | re.S)
    text = re.sub(r"^ *>>>.*$", " ", text, flags=re.M)
    return re.sub(r"``[^`]*``|`[^`]*`|\]\([^)]*\)", " x ", text)


def uses(pattern: re.Pattern[str], text: str) -> list[str]:
    """Return each match of `pattern` in a text with the words around it."""
    text = ALLOWED.sub(" ", prose(text))
    return [
        " ".join(text[max(0, match.start() - 30) : match.end() + 30].split())
        for match in pattern.finditer(text)
    ]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def docstrings(path: Path) -> list[ast.Constant]:
    """Return the docstrings of a module and of its classes and functions."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        node.body[0].value
        for node in ast.walk(tree_of(path))
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None
    ]


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the comments of a module, each block of lines as one text."""
    lines = {}
    for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0]] = token.string.lstrip("# ")
    start = None
    for line in sorted(lines):
        if line - 1 not in lines:
            start = line
            block = []
        block.append(lines[line])
        if line + 1 not in lines:
            yield start, "\n".join(block)


@functools.cache
def texts(path: Path) -> list[tuple[int, str]]:
    """Return the docstrings and comments of a module with their lines."""
    return [*((node.lineno, node.value) for node in docstrings(path)), *comments(path)]


def messages(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the other strings of a module that have several words."""
    ids = {id(node) for node in docstrings(path)}
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.Constant(value=str(text)) if " " in text.strip() and id(node) not in ids:
                yield node.lineno, text


def names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the names that a module defines: its own, classes, functions, parameters, variables."""
    yield 1, path.stem
    for node in ast.walk(tree_of(path)):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr
            case ast.alias(asname=str()):
                yield node.lineno, node.asname


def listing(findings: list[tuple[Path, int, str]]) -> str:
    """Return one line per finding."""
    return "\n".join(f"{path.relative_to(ROOT)}:{line}: {text}" for path, line, text in findings)


def words(pattern: re.Pattern[str], *, with_messages: bool) -> list[tuple[Path, int, str]]:
    """Return the uses of a pattern in all modules."""
    return [
        (path, line, use)
        for path in MODULES
        for part in ([texts, messages] if with_messages else [texts])
        for line, text in part(path)
        for use in uses(pattern, text)
    ]


def test_sources_have_no_banned_word():
    assert not listing(words(BANNED, with_messages=True))


def test_pages_have_no_banned_word():
    findings = [
        (page, 1, use) for page in PAGES for use in uses(BANNED, page.read_text(encoding="utf-8"))
    ]
    assert not listing(findings)


def test_no_name_is_banned():
    findings = [
        (path, line, name)
        for path in MODULES
        for line, name in names(path)
        if name.lstrip("_") in NAMES and (path.stem, name) not in PUBLISHED
    ]
    assert not listing(findings)


def test_class_names_are_unique():
    modules_of: dict[str, set[Path]] = {}
    for path in MODULES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef):
                modules_of.setdefault(node.name.lstrip("_"), set()).add(path)
    repeated = {name for name, paths in modules_of.items() if len(paths) > 1}
    assert repeated - set(first_column("Class names")) == set()


def test_rare_words_are_rare_in_sources():
    findings = words(RARE, with_messages=False)
    assert len(findings) <= RARE_IN_SOURCES, listing(findings)


def test_rare_words_are_rare_in_pages():
    findings = [use for page in PAGES for use in uses(RARE, page.read_text(encoding="utf-8"))]
    assert len(findings) <= RARE_IN_PAGES, "\n".join(findings)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Compute the metrics anew.", 1),
        ("The figures\nof an epoch.", 1),
        ("At most so\n    many rows.", 1),
        ("Read ``figures`` and `told`.", 0),
        ("The answer is on its way to the driver.", 1),
        ("Draw a configuration.", 0),
    ],
)
def test_banned_words_are_found(text, expected):
    assert len(uses(BANNED, text)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("Sort in place.", 0), ("Three decimal places.", 0), ("Its own place.", 2), ("Beside it.", 1)],
)
def test_rare_words_are_counted(text, expected):
    assert len(uses(RARE, text)) == expected
