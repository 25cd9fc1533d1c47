import functools
import pickle
import traceback

import pytest

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


@pytest.mark.parametrize("kind", [UsageError, MissingExtraError, WorkerError, WorkerLost])
def test_every_exception_belongs_to_the_family(kind):
    assert issubclass(kind, BigDLError)
    assert issubclass(kind, RuntimeError)


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
    ("given", "shown"),
    [
        ("redis+cluster://:s3cret@host:7000", "redis+cluster://:***@host:7000"),
        ("postgresql://app:s3cret@db/search", "postgresql://app:***@db/search"),
        (
            "s3://KEY:s3cret@bucket/a and hdfs://u:s3cret@h",
            "s3://KEY:***@bucket/a and hdfs://u:***@h",
        ),
        ("hdfs://user@host/data, not me@example.com: this", None),
    ],
)
def test_passwords_of_urls_are_not_shown(given, shown):
    sentence = str(UsageError(f"There is nothing at {given!r}"))
    assert sentence == f"There is nothing at {shown or given!r}"
    assert pickle.loads(pickle.dumps(UsageError(sentence))).args == (sentence,)


def test_tokens_are_not_shown():
    from bigdl.friesian.serving import Security

    assert "s3cret" not in repr(Security(token="s3cret"))
