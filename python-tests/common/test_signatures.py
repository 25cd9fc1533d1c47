"""Signatures of BigDL 2.x accepted by this version, compared line by line."""

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest

from bigdl.orca import arguments

SCRIPT = Path(__file__).parents[2] / "scripts" / "compare_signatures.py"


def load_script():
    spec = importlib.util.spec_from_file_location(SCRIPT.stem, SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


compare_signatures = load_script()
PUBLISHED = compare_signatures.read()


@pytest.fixture(scope="module")
def compared():
    """Yield each published signature with its differences."""
    return [(each, compare_signatures.differences(each)) for each in PUBLISHED]


@pytest.mark.slow
def test_every_difference_has_a_reason_and_every_reason_a_difference(compared):
    assert [line for each in compared for line in compare_signatures.mistakes(*each)] == []


def test_no_line_is_there_twice():
    titles = [each.title for each in PUBLISHED]
    assert {title for title in titles if titles.count(title) > 1} == set()


def test_the_documentation_has_the_table(compared):
    page = compare_signatures.PAGE.read_text(encoding="utf-8")
    advice = "run: python scripts/compare_signatures.py --write"
    assert compare_signatures.with_table(page, compare_signatures.table(compared)) == page, advice


@pytest.mark.parametrize(
    "name",
    [
        name
        for each in PUBLISHED
        if each.name == "bigdl.orca.init_orca_context"
        for text in each.texts("keywords")
        for name in text.split()
    ],
)
def test_a_keyword_of_the_context_is_known(name):
    arguments.check_names({name: None})


# --- the comparison


def pages(data, epochs=1, *, batch_size=32, **old):
    """Accept arguments like a function of this version."""


def found(published: str) -> list[tuple[str, str, str]]:
    old = compare_signatures.signature_of(published)
    differences = compare_signatures.differences_of(old, inspect.signature(pages))
    return [(each.argument, each.old, each.here) for each in differences]


@pytest.mark.parametrize(
    "same",
    [
        "data, epochs=1",
        "data, epochs=...",
        "rows, /, epochs=1",
        "data, epochs, *, batch_size=32",
        "data, **kwargs",
    ],
)
def test_calls_of_old_programs_that_still_work_are_no_difference(same):
    assert found(same) == []


@pytest.mark.parametrize(
    ("old", "difference"),
    [
        ("data, epochs=2", ("epochs", "`epochs=2`", "`epochs=1`")),
        ("data, epochs=True", ("epochs", "`epochs=True`", "`epochs=1`")),
        ("epochs=1, data=None", ("epochs", "`epochs` as argument 1", "`epochs` as argument 2")),
        (
            "data, epochs=1, batch_size=32",
            ("batch_size", "`batch_size=32`", "`batch_size=` by keyword only"),
        ),
        ("data, info=None", ("info", "`info=None`", "in `**old`")),
        ("data, *rest", ("rest", "`*rest`", "not taken")),
        ("data=None", ("data", "`data=None`", "`data` is required")),
        ("*, epochs=1", ("data", "", "`data` is required")),
        ("a, b, c, /", ("c", "argument 3", "not taken")),
    ],
)
def test_a_difference_is_found(old, difference):
    assert difference in found(old)


def test_a_name_that_is_not_there_is_a_difference():
    for name in (
        "bigdl.orca.no_module.function",
        "bigdl.orca.data.XShards.none",
        "bigdl.orca.none",
    ):
        with pytest.raises(compare_signatures.NotThereError):
            compare_signatures.signature_here(name)


def test_self_is_no_argument_and_what_a_function_returns_is_found():
    here = compare_signatures.signature_here
    assert list(here("bigdl.orca.data.XShards.transform_shard").parameters) == ["func", "args"]
    assert list(here("bigdl.orca.OrcaContext.get_ray_context").parameters) == []
    made = here("bigdl.orca.learn.pytorch.Estimator.from_torch().load_state_dict")
    assert list(made.parameters) == ["state_dict", "blocking"]


def test_reasons_belong_to_arguments(tmp_path):
    listed = tmp_path / "listed.txt"
    listed.write_text("# a comment\n\na.b(x=1, y=2)\n    because x: of this\n    version: 2.0\n")
    (published,) = compare_signatures.read(listed)
    assert published.title == "a.b (2.0)"
    about = [compare_signatures.Difference(name, f"`{name}`", "not taken") for name in "xy"]
    assert compare_signatures.mistakes(published, about) == [
        "a.b (2.0): `y` in 2.x, here not taken"
    ]
    assert compare_signatures.mistakes(published, []) == [
        "a.b (2.0) does not differ, as this says: of this"
    ]
    table = compare_signatures.table([(published, about[:1])])
    assert table.splitlines()[-1] == "| `a.b` (2.0) | `x` | not taken | of this |"


def test_a_line_that_cannot_be_read_is_named(tmp_path):
    listed = tmp_path / "listed.txt"
    listed.write_text("a.b(x)\nwhatever\n")
    with pytest.raises(
        SystemExit, match=r"listed.txt:2 is neither a signature nor a note: whatever"
    ):
        compare_signatures.read(listed)
