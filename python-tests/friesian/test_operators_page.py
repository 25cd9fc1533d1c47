"""Tests of the tables in docs/friesian/operators.md: each operator gives the right-hand table."""

import ast
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "friesian" / "operators.md"
ARROW = "→"


def tables(text):
    """Yield the text before each table of the page, and the table's rows, header first."""
    words, rows = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            rows.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
            continue
        if rows:
            yield "\n".join(words), [rows[0], *rows[2:]]
            words, rows = [], []
        words.append(line)


def examples(text):
    """Yield the call of each operator, the tables that it names, and both sides of its table."""
    call, named = None, {}
    for words, rows in tables(text):
        lines = words.strip().split("\n\n")[-1]
        calls = re.match(r"`(tbl\.[^`]*)`", lines)
        if calls:
            call, named = calls[1], {}
        name = re.search(r"`(\w+)`:$", lines)
        if name and ARROW not in rows[0]:
            named[name[1]] = rows
        elif ARROW in rows[0] and call is not None:
            yield call, dict(named), rows
            call = None


def cell(text):
    """Parse the value that a cell of the page shows."""
    text = re.sub(r", the .*", "", text)
    try:
        return ast.literal_eval(text.replace("null", "None"))
    except (SyntaxError, ValueError):
        return text


def table_of(make, header, rows):
    """Build a FeatureTable from a table of the page."""
    columns = [[cell(row[i]) for row in rows] for i in range(len(header))]
    columns = [
        [str(v) if isinstance(v, tuple) else v for v in each] if _is_text(each) else each
        for each in columns
    ]
    schema = ", ".join(f"`{n}` {_type(each)}" for n, each in zip(header, columns, strict=True))
    return make(list(zip(*columns, strict=True)), schema)


def _is_text(values):
    return any(isinstance(value, str) for value in values)


def _type(values):
    known = [value for value in values if value is not None]
    if isinstance(known[0], list):
        return f"array<{_type(known[0])}>"
    return {int: "int", float: "double", str: "string"}[type(known[0])]


def shown(value):
    """Convert a value to a form that can be compared and sorted."""
    if isinstance(value, list):
        return tuple(map(shown, value))
    if isinstance(value, float):
        return round(value, 2)
    return value


OPERATORS = """
    add_hist_seq add_neg_hist_seq add_negative_samples add_value_features category_encode clip
    concat count_encode cross_columns cut_bins difference_lag drop_duplicates encode_string
    fill_median fillna group_by hash_encode join_as_of joint_encode log mask merge_cols
    min_max_scale one_hot_encode pad reindex sample_listwise target_encode
    target_encode_by_time transform_min_max_scale
"""
EXAMPLES = list(examples(PAGE.read_text(encoding="utf-8")))


@pytest.mark.slow_cases('tbl.category_encode("city")')
@pytest.mark.parametrize(
    ("call", "named", "rows"), [pytest.param(*example, id=example[0]) for example in EXAMPLES]
)
def test_an_operator_does_what_its_table_shows(make, call, named, rows):
    header, *rows = rows
    middle = header.index(ARROW)
    left, right = header[:middle], header[middle + 1 :]
    right = [name for name in right if not name.startswith("(")]  # of another argument
    before = [row[:middle] for row in rows if any(row[:middle])]
    after = [row[middle + 1 :][: len(right)] for row in rows]
    kept = []
    if all(any(row[:middle]) for row in rows) and "group_by" not in call:
        kept = [name for name in left if name not in right]
    given = {name: table_of(make, *_split(each)) for name, each in named.items()}
    found = eval(call, {"tbl": table_of(make, left, before), **given})
    found = (found[0] if isinstance(found, tuple) else found).df
    kept = [name for name in kept if name in found.columns]
    wanted = [
        tuple(shown(cell(row[left.index(name)])) for name in kept)
        + tuple(map(shown, map(cell, new)))
        for row, new in zip(rows, after, strict=True)
        if any(new)
    ]
    names = [f"`{name}`" for name in [*kept, *right]]
    got = [tuple(map(shown, row)) for row in found.select(*names).collect()]
    assert sorted(got, key=repr) == sorted(wanted, key=repr)


def _split(rows):
    return rows[0], rows[1:]


def test_the_page_shows_every_kind_of_operator():
    shown_ones = {re.match(r"tbl\.(\w+)", call)[1] for call, _, _ in EXAMPLES}
    assert shown_ones >= set(OPERATORS.split())


def test_bins_correspond_to_those_of_pandas_as_the_page_on_migration_says(make):
    ages, edges = [7, 18, 19, 39, 40, 41, 65, None], [18, 40]
    frame = pd.DataFrame({"age": ages})
    table = make([(age,) for age in ages], "age int")
    cuts = {"left": edges, "right": [edge + 1 for edge in edges]}
    for name, each in cuts.items():
        table = table.append_column(name, table.age).cut_bins(name, each, out_cols=name)
    found = table.to_pandas().set_index("age")
    wide = [-np.inf, *edges, np.inf]
    left = pd.cut(frame["age"], wide, right=False, labels=False).fillna(len(edges) + 1)
    right = pd.cut(frame["age"], edges, labels=False) + 1
    right = right.mask(frame["age"] <= 18, 0).mask(frame["age"] > 40, 2).fillna(len(edges) + 1)
    for age, *wanted in zip(ages, left, right, strict=True):
        got = found.loc[found.index.isna()] if age is None else found.loc[[age]]
        assert got.values.tolist() == [wanted]
