import pickle

import pytest

from bigdl.common.errors import (
    BigDLError,
    MissingExtraError,
    UsageError,
    WorkerError,
    WorkerLost,
    require,
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
