"""Tracebacks of errors that public functions raise: the user's lines and one message."""

import subprocess
import sys
import textwrap
import traceback

import numpy as np
import pytest
import torch

from bigdl.common.errors import UsageError, WorkerError, hide_frames
from bigdl.data import TableLoader
from bigdl.orca import init_orca_context
from bigdl.orca.learn.pytorch import Estimator

ROWS = np.zeros((8, 1), "float32")


def estimator(model=None):
    return Estimator.from_torch(
        model=model or (lambda config: torch.nn.Linear(1, 1)),
        optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        backend="local",
    )


CALLS = {
    "fit": lambda: estimator().fit((ROWS, ROWS), epochs=1, batch_size=0),
    "path": lambda: estimator().fit("/none", epochs=1, feature_cols=["a"], label_cols=["b"]),
    "load": lambda: estimator().load("/none/model.pt"),
    "from_torch": lambda: Estimator.from_torch(model=torch.nn.ReLU(), optimiser=None),
    "init_orca_context": lambda: init_orca_context("lokal"),
    "TableLoader": lambda: TableLoader("/none", batch_size=3),
}


def frames_of(call):
    with pytest.raises((UsageError, WorkerError)) as caught:
        call()
    text = "".join(traceback.format_exception(caught.value))
    return [line for line in text.splitlines() if line.startswith('  File "')], text


@pytest.mark.parametrize("name", CALLS)
def test_an_error_shows_the_lines_of_the_user_only(name):
    frames, text = frames_of(CALLS[name])
    assert all(__file__ in frame for frame in frames), text
    assert text.count("Traceback") == 1, text


def test_the_switch_shows_all_frames(monkeypatch):
    monkeypatch.setenv("BIGDL_FULL_TRACEBACK", "1")
    assert any("bigdl/orca" in frame for frame in frames_of(CALLS["fit"])[0])


def test_user_code_between_two_calls_stays_visible():
    @hide_frames
    def fit(callback):
        callback()

    def on_epoch_end():
        estimator().fit((ROWS, ROWS), epochs=1, batch_size=0)

    frames, text = frames_of(lambda: fit(on_epoch_end))
    assert any("in on_epoch_end" in frame for frame in frames), text
    assert not any("bigdl/" in frame for frame in frames), text


def test_causes_of_libraries_are_hidden_and_those_of_the_user_are_shown():
    @hide_frames
    def read(path):
        try:
            path()
        except (ValueError, KeyError) as error:
            raise UsageError("the rows cannot be read") from error

    def users():
        raise KeyError("age")

    assert "KeyError: 'age'" in frames_of(lambda: read(users))[1]
    frames, text = frames_of(lambda: read(lambda: int("x")))
    assert "ValueError" in text  # a line of this file called int
    del frames
    with pytest.raises(UsageError) as caught:
        estimator().load("/none/model.pt")
    assert caught.value.__cause__ is None


def test_other_errors_keep_their_frames_without_the_wrapper():
    @hide_frames
    def broken():
        raise KeyError("age")

    with pytest.raises(KeyError) as caught:
        broken()
    names = [each.name for each in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "broken"
    assert "call" not in names


def test_worker_errors_show_the_lines_of_the_user_in_the_worker():
    frames, text = frames_of(
        lambda: estimator(lambda config: 1 / 0).fit((ROWS, ROWS), epochs=1, batch_size=8)
    )
    assert all(__file__ in frame for frame in frames), text
    assert text.count("ZeroDivisionError") >= 1


@pytest.mark.parametrize("program", [(), ("-m", "IPython", "--no-banner", "--colors=NoColor")])
def test_programs_end_with_one_line_and_the_message(program, tmp_path):
    file = tmp_path / "program.py"
    file.write_text(
        textwrap.dedent("""
        from bigdl.orca import init_orca_context

        init_orca_context("lokal")
        """)
    )
    run = subprocess.run(
        [sys.executable, *program, file], capture_output=True, text=True, cwd=tmp_path
    )
    output = run.stdout + run.stderr
    assert 'init_orca_context("lokal")' in output
    assert "got 'lokal'" in output
    assert "errors.py" not in output, output
    assert "context.py" not in output, output
