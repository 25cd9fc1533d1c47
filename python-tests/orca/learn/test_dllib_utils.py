"""Names of ``bigdl.dllib.utils``, and SafePickle."""

import io
import os
import pickle
import pickletools
import sys
from collections import Counter, OrderedDict
from datetime import date, datetime, timedelta
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.dllib.utils import common, file_utils, log4Error, utils
from bigdl.orca.common import SafePickle


def test_a_check_that_holds_does_nothing():
    log4Error.invalidInputError([1], "no")
    log4Error.invalidOperationError(True, "no", "fix", KeyError("no"))


@pytest.mark.parametrize("check", [log4Error.invalidInputError, log4Error.invalidOperationError])
@pytest.mark.parametrize("caught", [RuntimeError, ValueError])
def test_a_check_that_fails_raises_its_message_and_the_advice(check, caught):
    with pytest.raises(caught) as raised:
        check(0, errMsg="it is wrong", fixMsg="do that")
    assert str(raised.value) == "it is wrong"
    assert raised.value.__notes__ == ["What to do: do that"]


def test_the_cause_is_raised_itself():
    cause = KeyError("x")
    with pytest.raises(KeyError) as raised:
        log4Error.invalidOperationError(False, "it failed", cause=cause)
    assert raised.value is cause
    assert cause.__notes__ == ["it failed"]


def test_star_imports_give_the_functions():
    names = {}
    exec("from bigdl.dllib.utils.log4Error import *", names)
    exec("from bigdl.dllib.utils.common import *", names)
    assert {"invalidInputError", "invalidOperationError", "get_node_and_core_number"} <= set(names)


def test_what_lived_in_the_jvm_is_said_to():
    with refused("name-dropped"):
        from bigdl.dllib.utils.common import JTensor  # noqa: F401
    assert not hasattr(common, "never_was")


def test_nodes_and_cores_of_the_active_spark(orca_spark):
    assert common.get_node_and_core_number() == (1, 2)
    assert common.get_spark_context() is orca_spark.sparkContext


def test_files_are_copied_with_the_arguments_of_dllib(tmp_path):
    (tmp_path / "x").write_text("x")
    source, target = str(tmp_path / "x"), str(tmp_path / "y")
    assert file_utils.put_local_file_to_remote(source, target) == 0
    (tmp_path / "x").write_text("z")
    assert file_utils.put_local_file_to_remote(source, target, True) == 0
    assert (tmp_path / "y").read_text() == "z"
    assert file_utils.is_local_path(target)


def test_name_of_the_conda_environment(tmp_path, monkeypatch):
    prefix = tmp_path / "envs" / "mine"
    monkeypatch.setattr(sys, "prefix", str(prefix))
    monkeypatch.delenv("CONDA_PREFIX", raising=False)
    with refused("state"):
        utils.detect_conda_env_name()
    (prefix / "conda-meta").mkdir(parents=True)
    assert utils.detect_conda_env_name() == "mine"
    monkeypatch.setenv("CONDA_PREFIX", str(prefix))
    monkeypatch.setenv("CONDA_DEFAULT_ENV", "shown")
    assert utils.detect_conda_env_name() == "shown"
    assert utils.detect_python_location() == sys.executable
    assert utils.get_node_ip().count(".") == 3


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_plain = st.recursive(
    _scalars | st.binary() | st.datetimes(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=6,
)


@settings(max_examples=40)
@given(value=_plain, protocol=st.sampled_from([2, 4, 5]))
def test_plain_data_need_no_digest(value, protocol):
    assert SafePickle.loads(SafePickle.dumps(value, protocol=protocol)) == value


@pytest.mark.parametrize("protocol", [2, 5])
def test_arrays_and_dates_need_no_digest(protocol):
    value = OrderedDict(
        a=np.arange(6.0).reshape(2, 3),
        b=np.float32(1.5),
        c=np.array(["x", None], dtype=object),
        d=[date(2020, 1, 2), datetime(2020, 1, 2, 3), timedelta(4), Decimal("1.5")],
        e=Counter("abca"),
        f=np.array(["ab", "c"]),
    )
    back = SafePickle.loads(SafePickle.dumps(value, protocol=protocol))
    assert back.keys() == value.keys()
    for name in "acf":
        np.testing.assert_array_equal(back[name], value[name])
    assert [back[n] for n in "bde"] == [value[n] for n in "bde"]


class Runs:
    """Unpickling this makes a directory."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_foreign_code_runs_only_when_trusted(tmp_path):
    path = str(tmp_path / "made")
    data, digest = SafePickle.dumps(Runs(path), return_digest=True)
    with refused("file-untrusted", "trust=True"):
        SafePickle.loads(data)
    with refused("file-untrusted"):
        SafePickle.loads(data, digest="0" * 64)
    with refused("file-untrusted"):
        SafePickle.loads(data, digest="0" * 64, trust=True)
    with refused("file-untrusted"):
        SafePickle.loads(data + b".", digest)
    assert not os.path.exists(path)
    SafePickle.loads(data, trust=True)
    os.rmdir(path)
    SafePickle.loads(data, digest)
    assert os.path.exists(path)


@pytest.mark.parametrize("name", ["eval", "getattr", "__import__", "open", "type"])
def test_a_name_of_builtins_is_not_plain_data_by_itself(name):
    data = pickle.dumps(getattr(__import__("builtins"), name))
    assert any(name in str(argument) for _, argument, _ in pickletools.genops(data))
    with pytest.raises(UsageError, match=name):
        SafePickle.loads(data)


def test_files_hold_several_objects():
    file = io.BytesIO()
    assert SafePickle.dump({"a": 1}, file) is None
    digest = SafePickle.dump([2], file, return_digest=True)
    file.seek(0)
    assert SafePickle.load(file) == {"a": 1}
    assert SafePickle.load(file, digest) == [2]
