"""Conversions that are silent, in several threads at once."""

import logging
import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from refusals import refused
from torch.utils.data import DataLoader, TensorDataset

from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.pytorch import InferenceOptimizer, Trainer


def settings():
    return sys.stdout, sys.stderr, logging.root.manager.disable, list(warnings.filters)


def test_what_is_silenced_is_heard_again_afterwards(caplog):
    before = settings()
    with quiet():
        logging.getLogger("bigdl.converter").warning("within")
        with quiet():
            print("never seen")
        assert settings() != before
    assert settings() == before
    with caplog.at_level(logging.WARNING, "bigdl.converter"):  # others may have raised the root's
        logging.getLogger("bigdl.converter").warning("after")
    assert caplog.messages == ["after"]


def test_threads_that_come_and_go_in_any_order_leave_all_as_it_was():
    before = settings()
    first_is_in, second_is_in = threading.Event(), threading.Event()
    first_is_out = threading.Event()

    def first():
        with quiet():
            first_is_in.set()
            assert second_is_in.wait(60)
        first_is_out.set()

    def second():
        assert first_is_in.wait(60)
        with quiet():
            second_is_in.set()
            assert first_is_out.wait(60)

    threads = [threading.Thread(target=run) for run in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert settings() == before


@pytest.mark.slow
@pytest.mark.parametrize("module", ["bigdl.nano.tf.keras", "bigdl.friesian.models.keras"])
def test_tensorflow_reports_no_error_of_cuda_where_a_package_imports_it_first(module):
    program = f"import {module}\nimport tensorflow as tf\nprint(float(tf.constant(1.0) + 1))"
    environment = {name: os.environ[name] for name in os.environ if name != "TF_CPP_MIN_LOG_LEVEL"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "2.0\n"
    assert "cuInit" not in done.stderr


class Eigenvalues(torch.nn.Module):
    """Computes what ONNX has no operation for."""

    def forward(self, x):
        return torch.linalg.eigvalsh(x @ x.mT)


def test_what_cannot_be_converted_is_told_in_an_error_and_not_printed(capfd):
    with refused("model-unsupported"):
        InferenceOptimizer.trace(
            Eigenvalues(), accelerator="onnxruntime", input_sample=torch.ones(2, 3, 3)
        )
    assert capfd.readouterr() == ("", "")


def test_bars_of_rich_are_no_boxes_of_a_notebook(monkeypatch):
    rich = pytest.importorskip("rich")
    from bigdl.nano.acceleration import quiet as module

    monkeypatch.setattr(module, "in_notebook", lambda: True)
    monkeypatch.setattr(rich.get_console(), "is_jupyter", True)
    with quiet():
        assert not rich.get_console().is_jupyter
    assert rich.get_console().is_jupyter


def test_lightning_names_no_packages_to_install(caplog, tmp_path, monkeypatch):
    import pytorch_lightning as pl
    from pytorch_lightning.utilities.rank_zero import rank_zero_module

    monkeypatch.setattr(rank_zero_module.log, "handlers", [caplog.handler])
    monkeypatch.setattr(rank_zero_module.log, "level", logging.INFO)
    filters = list(rank_zero_module.log.filters)
    caplog.handler.setLevel(logging.INFO)
    plain = {"default_root_dir": tmp_path, "logger": False}
    pl.Trainer(**plain)
    tips = [each for each in caplog.messages if "Tip:" in each]
    caplog.clear()
    trainer = Trainer(**plain, enable_progress_bar=False)
    net = torch.nn.Linear(2, 1)
    model = Trainer.compile(net, torch.nn.MSELoss(), torch.optim.SGD(net.parameters(), 0.1))
    trainer.validate(model, DataLoader(TensorDataset(torch.ones(2, 2), torch.ones(2, 1))))
    assert caplog.messages
    assert [each for each in caplog.messages if "Tip:" in each] == []
    assert tips, "Lightning has none any more: the filter may go"
    assert rank_zero_module.log.filters == filters
