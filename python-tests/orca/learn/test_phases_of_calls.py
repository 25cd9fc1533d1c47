"""Lines that an evaluation and a slow prediction print while they run."""

import logging
import time

import numpy as np
import torch

from bigdl.orca.learn.pytorch import Estimator

ROWS = np.zeros((8, 1), "float32")


class Sleepy(torch.nn.Linear):
    def forward(self, x):
        time.sleep(2.2)
        return super().forward(x)


def estimator(model):
    return Estimator.from_torch(
        model=lambda config: model, loss=torch.nn.MSELoss(), metrics=["mse"], backend="local"
    )


def test_an_evaluation_says_with_how_many_workers_it_runs(capfd):
    estimator(torch.nn.Linear(1, 1)).evaluate((ROWS, ROWS))
    assert "evaluating with 1 worker\n" in capfd.readouterr().err


def test_the_log_level_hides_the_lines(capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger("bigdl.orca"), "level", logging.WARNING)
    estimator(torch.nn.Linear(1, 1)).evaluate((ROWS, ROWS))
    assert "evaluating" not in capfd.readouterr().err


def test_only_a_slow_prediction_prints_a_line(capfd):
    fast = estimator(torch.nn.Linear(1, 1))
    fast.predict(ROWS)
    capfd.readouterr()
    fast.predict(ROWS)
    assert "predicting" not in capfd.readouterr().err
    estimator(Sleepy(1, 1)).predict(ROWS)
    assert "predicting\n" in capfd.readouterr().err
