"""The chart of a fit."""

import math
import xml.etree.ElementTree as ET

import numpy as np
import torch
from refusals import refused

from bigdl.orca.learn.metrics import MAE
from bigdl.orca.learn.pytorch import Estimator
from bigdl.training.chart import FitChart


def epochs(count):
    profile = {"mean_train_epoch_s": 0.5, "mean_fetch_s": 0.001, "mean_fwd_s": 0.0, "ended_at": 1.0}
    return [
        {
            "epoch": 1 + number,
            "num_samples": 1000,
            "train_loss": 1 / (1 + number),
            "val_loss": 1.2 / (1 + number),
            "val_mae": math.nan if number == 1 else 3.0,
            "profile": profile,
        }
        for number in range(count)
    ]


def texts(svg):
    return [each.text for each in ET.fromstring(svg).iter() if each.tag.endswith("text")]


def test_every_figure_has_a_panel_with_its_last_value():
    shown = texts(FitChart(epochs(3))._repr_html_())
    panels = ["loss", "mae", "rows per second", "ms per batch"]
    assert [text for text in shown if text in panels] == panels
    assert {"training 0.3333", "validation 0.4", "validation 3", "2000", "fetch"} <= set(shown)
    assert "forward" not in shown  # nothing was measured of it


def test_one_epoch_and_logs_of_keras_are_drawn():
    logs = {"loss": 1.0, "val_loss": 2.0, "accuracy": 0.5}
    (entry,) = epochs(1)
    shown = texts(FitChart([{**entry, "logs": logs, "steps": 3}])._repr_html_())
    assert {"loss", "training 1", "validation 2", "accuracy", "training 0.5"} <= set(shown)


def test_an_estimator_plots_what_it_has_trained(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 1), torch.nn.Flatten(0))
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=torch.nn.MSELoss(),
        metrics=[MAE()],
        backend="local",
    )
    with refused("not-fitted"):
        est.plot()
    data = np.ones((8, 3), np.float32), np.ones(8, np.float32)
    est.fit(data, validation_data=data, batch_size=4)
    est.fit(data, validation_data=data, batch_size=4)
    shown = texts(est.plot(tmp_path / "fit.svg")._repr_html_())
    assert texts((tmp_path / "fit.svg").read_text()) == shown
    assert {"loss", "mae", "rows per second", "1", "2"} <= set(shown)
    est.plot(str(tmp_path / "fit.html"))
    assert "rows/s" in (tmp_path / "fit.html").read_text()
    with refused("path-unusable"):
        est.plot(tmp_path / "missing" / "fit.svg")
