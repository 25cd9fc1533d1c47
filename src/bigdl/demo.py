"""Demo program: two workers learn to classify points on two circles."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import BigDLError, require

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer


__all__ = ["run"]

_ROWS = 20_000


def run(backend: str = "auto", epochs: int = 5) -> float:
    """Train a small network, evaluate it, predict, and print the results.

    Parameters
    ----------
    backend : {"auto", "spark", "local"}, default "auto"
        ``"spark"`` uses a DataFrame of local Spark, ``"local"`` arrays in local processes;
        ``"auto"`` selects Spark if Java is available.
    epochs : int, default 5
        Number of training epochs.

    Returns
    -------
    float
        Accuracy on held-out rows.

    Examples
    --------
    >>> from bigdl.demo import run
    >>> run("local", epochs=3) > 0.9
    ...
    True
    """
    require("torch", "orca")
    started = time.monotonic()
    if backend == "auto":
        backend = "spark" if _has_java() else "local"
    print(f"{_ROWS:,} points of two circles, two workers, backend={backend!r}", flush=True)
    accuracy = _on_spark(epochs) if backend == "spark" else _local(epochs)
    print(f"Accuracy on new rows {accuracy:.3f}, {time.monotonic() - started:.1f} s in total.")
    return accuracy


def _has_java() -> bool:
    from bigdl.orca.cluster.java import find_java

    try:
        require("pyspark", "orca")
        find_java().close()
    except (BigDLError, ModuleNotFoundError):
        return False
    return True


def _points() -> dict[str, Any]:
    """Return random points near two circles as columns; label 1 means the outer circle."""
    import numpy as np

    random = np.random.default_rng(0)
    label = random.integers(0, 2, _ROWS)
    angle = random.uniform(0, 2 * np.pi, _ROWS)
    radius = 1 + label + random.normal(0, 0.2, _ROWS)
    x, y = radius * np.cos(angle), radius * np.sin(angle)
    return {"x": x.astype("float32"), "y": y.astype("float32"), "label": label}


def _network(config: dict[str, Any]) -> nn.Module:
    from torch import nn

    return nn.Sequential(
        nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2)
    )


def _optimizer(model: nn.Module, config: dict[str, Any]) -> Optimizer:
    import torch

    return torch.optim.Adam(model.parameters(), lr=0.01)


def _estimator(backend: str) -> Any:
    from torch import nn

    from bigdl.orca.learn.metrics import Accuracy
    from bigdl.orca.learn.pytorch import Estimator

    return Estimator.from_torch(
        model=_network,
        optimizer=_optimizer,
        loss=nn.CrossEntropyLoss(),
        metrics=[Accuracy()],
        config={},
        workers_per_node=2,
        backend=backend,
    )


def _on_spark(epochs: int) -> float:
    import pandas as pd

    from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context

    init_orca_context("local", cores=2)
    try:
        points = pd.DataFrame(_points())
        points["x_y"] = points[["x", "y"]].to_numpy().tolist()
        frame = OrcaContext.get_spark_session().createDataFrame(points[["x_y", "label"]])
        train, test = frame.randomSplit([0.8, 0.2], seed=0)
        columns = {"feature_cols": ["x_y"], "label_cols": ["label"]}
        estimator = _estimator("spark")
        estimator.fit(train, epochs=epochs, batch_size=256, seed=0, **columns)
        accuracy = float(estimator.evaluate(test, batch_size=1024, **columns)["Accuracy"])
        estimator.predict(test, batch_size=1024, feature_cols=["x_y"]).show(3, truncate=40)
        return accuracy
    finally:
        stop_orca_context()


def _local(epochs: int) -> float:
    import numpy as np

    points = _points()
    inputs, labels = np.stack([points["x"], points["y"]], axis=1), points["label"]
    cut = _ROWS * 4 // 5
    estimator = _estimator("local")
    estimator.fit({"x": inputs[:cut], "y": labels[:cut]}, epochs=epochs, batch_size=256, seed=0)
    test = {"x": inputs[cut:], "y": labels[cut:]}
    accuracy = float(estimator.evaluate(test, batch_size=1024)["Accuracy"])
    print("predictions of three rows:", estimator.predict({"x": inputs[cut : cut + 3]}))
    return accuracy
