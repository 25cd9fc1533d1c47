"""Public functions restore the process-wide state of the program."""

import json
import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import program_state
import pytest
import torch

from bigdl.common import program_state as kept_state
from bigdl.common.cpu import in_new_thread, thread_scope

_PROGRAMS = Path(program_state.__file__).with_name("state_programs.py")


_LONG = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("nano", "keras", "ray", "spark", "servers")
]


@pytest.mark.parametrize("program", ["local", *_LONG])
def test_a_verb_leaves_the_program_as_it_was(program, tmp_path):
    for package in {"ray": ["ray"], "keras": ["keras", "tensorflow"]}.get(program, []):
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, _PROGRAMS, program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(_PROGRAMS.parent)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    lines = [line[6:] for line in done.stdout.splitlines() if line.startswith("STATE ")]
    changed = {name: changes for name, changes in map(json.loads, lines) if changes}
    assert lines
    assert changed == {}


def test_scopes_of_threads_put_back_what_later_threads_start_with():
    before = torch.get_num_threads(), in_new_thread(torch.get_num_threads)
    try:
        torch.set_num_threads(1)
        with thread_scope(2):
            assert in_new_thread(torch.get_num_threads) == 2
        assert in_new_thread(torch.get_num_threads) == 1
        in_new_thread(lambda: torch.set_num_threads(2))  # for later threads, not for this one
        with thread_scope(3):
            pass
        assert (torch.get_num_threads(), in_new_thread(torch.get_num_threads)) == (1, 2)
    finally:
        in_new_thread(lambda: torch.set_num_threads(before[1]))
        torch.set_num_threads(before[0])


def test_what_an_import_changes_is_put_back():
    def handler(*_):
        raise AssertionError

    logger = logging.getLogger("of a package")
    logger.setLevel(logging.ERROR)
    before = program_state.snapshot()
    with kept_state.preserve_program_state(), kept_state.preserve_program_state():
        logging.getLogger().addHandler(logging.StreamHandler())
        logging.setLoggerClass(type("Other", (logging.Logger,), {}))
        logger.setLevel(logging.INFO)
        random.random()
        np.random.rand()
        torch.rand(1)
        sys.excepthook = handler
        multiprocessing.set_start_method("spawn", force=True)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
    assert program_state.differences(before, program_state.snapshot()) == []


def test_a_difference_is_told_by_name(monkeypatch):
    before = program_state.snapshot()
    monkeypatch.setenv("A_VARIABLE_OF_A_TEST", "1")
    assert program_state.differences(before, program_state.snapshot()) == [
        "environment: A_VARIABLE_OF_A_TEST: nothing -> '1'"
    ]
    assert program_state.differences(before, program_state.snapshot(), ("environment: A_V",)) == []
