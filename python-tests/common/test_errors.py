import ast
import functools
import pickle
import re
import traceback
from pathlib import Path

import pytest

from bigdl.common.error_codes import CODES
from bigdl.common.errors import (
    BigDLError,
    MissingExtraError,
    UsageError,
    WorkerError,
    WorkerLost,
    require,
    short_traceback,
)


@pytest.mark.parametrize("family", [BigDLError, RuntimeError, ValueError])
def test_usage_error_is_caught_by_programs_of_any_generation(family):
    with pytest.raises(family, match="batch_size"):
        raise UsageError("batch_size must be at least 1, but it is 0")


@pytest.mark.parametrize("error_class", [UsageError, MissingExtraError, WorkerError, WorkerLost])
def test_every_exception_belongs_to_the_family(error_class):
    assert issubclass(error_class, BigDLError)
    assert issubclass(error_class, RuntimeError)


def test_require_returns_the_module_itself_and_not_its_package():
    import json.decoder

    assert require("json.decoder", "none") is json.decoder


def test_require_of_a_missing_package_gives_the_pip_line():
    with pytest.raises(MissingExtraError) as caught:
        require("no_such_package.part", "ray")
    assert str(caught.value) == "no_such_package is not installed; run: pip install 'bigdl[ray]'"
    assert isinstance(caught.value, ImportError)


def test_require_does_not_mask_a_broken_import_inside_an_installed_package(tmp_path, monkeypatch):
    (tmp_path / "half_installed.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as caught:
        require("half_installed", "ray")
    assert not isinstance(caught.value, MissingExtraError)


def test_require_does_not_mask_an_error_at_import(tmp_path, monkeypatch):
    (tmp_path / "built_for_another.py").write_text("import sys\nsys.no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(AttributeError, match="no_such_name"):
        require("built_for_another", "ray")


def test_worker_error_survives_pickling():
    error = pickle.loads(pickle.dumps(WorkerError(3, "KeyError", "Traceback ...\nKeyError: 'x'\n")))
    assert (error.rank, error.kind) == (3, "KeyError")
    assert error.traceback == "Traceback ...\nKeyError: 'x'\n"
    assert str(error) == "KeyError in worker 3:\nTraceback ...\nKeyError: 'x'"


def _traceback(function):
    try:
        function()
    except Exception:
        return traceback.format_exc()


def test_a_traceback_begins_with_the_users_frames():
    def deep(levels):
        if levels:
            return deep(levels - 1)
        raise KeyError("missing")

    # sorted is called by the standard library, which is called by us: neither is the user's
    text = _traceback(lambda: functools.reduce(lambda _, n: deep(n), [0, 9]))
    led_here = '  File "/x/lib/python3.11/site-packages/torch/nn.py", line 1, in call\n    f()\n'
    text = text.replace(":\n", f":\n{led_here}", 1)
    lines = short_traceback(text).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{__file__}"')
    assert lines[-1] == "KeyError: 'missing'"
    assert "  ..." in lines
    assert len(lines) <= 12
    assert "torch" not in short_traceback(text)


def test_a_traceback_names_the_cause_and_stays_if_nothing_is_the_users():
    def fails():
        try:
            raise KeyError("a")
        except KeyError as error:
            raise ValueError("two\nlines") from error

    assert short_traceback(_traceback(fails)).endswith(
        "ValueError: two\nlines\ncaused by KeyError: 'a'"
    )
    frame = (
        '  File "/x/lib/python3.11/json/decoder.py", line 1, in decode\n    code()\n    ^^^^^^\n'
    )
    text = f"Traceback (most recent call last):\n{frame * 6}JSONDecodeError: no"
    assert short_traceback(text).count("decoder.py") == 4
    assert short_traceback("no traceback\n") == "no traceback"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("redis+cluster://:s3cret@host:7000", "redis+cluster://:***@host:7000"),
        ("postgresql://app:s3cret@db/search", "postgresql://app:***@db/search"),
        (
            "s3://KEY:s3cret@bucket/a and hdfs://u:s3cret@h",
            "s3://KEY:***@bucket/a and hdfs://u:***@h",
        ),
        ("redis://app:s3c@ret@host:1", "redis://app:***@host:1"),
        ("postgresql://app:s3/cret@db", "postgresql://app:***@db"),
        ("https://s3cret@host/x.git", "https://***@host/x.git"),
        ("jdbc:x://h/d?user=u&password=s3cret", "jdbc:x://h/d?user=u&password=***"),
        ("https://h/x?sv=1&sig=s3cret&k=2", "https://h/x?sv=1&sig=***&k=2"),
        ("x;AccountKey=s3cret;y", "x;AccountKey=***;y"),
        ("https://h/x?X-Amz-Signature=s3cret&a=1", "https://h/x?X-Amz-Signature=***&a=1"),
        ("https://h/#access_token=s3cret", "https://h/#access_token=***"),
        ("https://h/x?client_secret=s3cret&n=1", "https://h/x?client_secret=***&n=1"),
        ("redis:://app:s3cret@host and //app:s3cret@h", "redis:://app:***@host and //app:***@h"),
        ("hdfs://user@host/data, not me@example.com: this", None),
        ("hdfs://nn:8020/user@x, http://h:80/a?page=1, token=", None),
    ],
)
def test_passwords_of_urls_are_not_shown(text, shown):
    sentence = str(UsageError(f"There is nothing at {text!r}"))
    assert sentence == f"There is nothing at {shown or text!r}"
    assert pickle.loads(pickle.dumps(UsageError(sentence))).args == (sentence,)


def test_tokens_are_not_shown():
    from bigdl.friesian.serving import Security

    assert "s3cret" not in repr(Security(token="s3cret"))


# codes ------------------------------------------------------------------------------------------

_ROOT = Path(__file__).parents[2]
_RAISED = {"UsageError", "SourceError", "as_usage_error"}


def _codes_in_source():
    """Yield file, line and code node (or None) of each error created in the sources."""
    for file in (_ROOT / "src").rglob("*.py"):
        tree = ast.parse(file.read_text())
        imported = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
            for alias in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _RAISED & imported:
                code = next((each.value for each in node.keywords if each.arg == "code"), None)
                yield f"{file.relative_to(_ROOT)}:{node.lineno}", code
            elif isinstance(node, ast.ClassDef):
                for each in node.body:
                    if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "code":
                        yield f"{file.relative_to(_ROOT)}:{each.lineno}", each.value


def test_each_error_of_the_sources_has_a_code_of_the_list():
    without = [
        where
        for where, code in _codes_in_source()
        if code is None or (isinstance(code, ast.Constant) and code.value not in CODES)
    ]
    allowed = ("src/bigdl/common/checks.py", "src/bigdl/orca/cluster/spark_calls.py")
    assert [each for each in without if not each.startswith(allowed)] == []


def test_the_guide_lists_the_codes():
    text = (_ROOT / "docs/guides/troubleshooting.md").read_text()
    assert dict(re.findall(r"^\| `([a-z-]+)` \| (.*) \|$", text, re.MULTILINE)) == CODES


def test_facts_of_an_error_are_attributes_and_travel_with_it():
    error = UsageError("no 'a'", code="column-missing", column="a", columns=("b", object()))
    sent = pickle.loads(pickle.dumps(error))
    assert (sent.code, sent.column, sent.columns) == ("column-missing", "a", ["b", "object"])
    assert str(sent) == "no 'a'"
    assert not hasattr(sent, "path")
    assert sent.with_message("other").facts == error.facts


def test_facts_hold_no_password():
    error = UsageError("no", code="cluster-unreachable", address="redis://app:s3cret@host:6379")
    assert error.address == "redis://app:***@host:6379"
