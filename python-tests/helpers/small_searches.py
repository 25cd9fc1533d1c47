"""Small searches: a regression that takes milliseconds."""

import numpy as np

from bigdl.orca.automl import hp

SPACE = {"lr": hp.loguniform(1e-3, 1e-1), "units": hp.choice([4, 8]), "batch_size": 32}


def rows(count=160, seed=0):
    """Arrays `x` (count, 4) and `y` (count,), which a small network can learn."""
    x = np.random.default_rng(seed).normal(size=(count, 4)).astype("float32")
    return x, (x[:, 0] - 2 * x[:, 1]).astype("float32")


def model(config):
    import torch

    return torch.nn.Sequential(
        torch.nn.Linear(4, config.get("units", 4)),
        torch.nn.Tanh(),
        torch.nn.Linear(config.get("units", 4), 1),
    )


def search(logs_dir, backend="local", **parts):
    """An AutoEstimator of the small network."""
    from bigdl.orca.automl.auto_estimator import AutoEstimator

    parts = {"model_creator": model, "optimizer": "Adam", "loss": "MSELoss", **parts}
    return AutoEstimator.from_torch(logs_dir=str(logs_dir), backend=backend, **parts)


def fit(est, data=None, **options):
    """Fit with what the tests have in common."""
    given = {
        "epochs": 2,
        "validation_data": rows(60, 1),
        "metric": "mse",
        "n_sampling": 3,
        "search_space": SPACE,
        "concurrency": 1,
        **options,
    }
    est.fit(rows() if data is None else data, **given)
    return est


def mse(model, data):
    """What the model really predicts."""
    import torch

    x, y = data
    with torch.no_grad():
        predicted = model(torch.from_numpy(x)).numpy()[:, 0]
    return float(((predicted - y) ** 2).mean())
