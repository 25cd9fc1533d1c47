"""One Ray for all tests of a pytest process, and a small training on it."""

import numpy as np
import pytest

from bigdl.orca import init_orca_context


def active_ray():
    """The context of a Ray of two CPUs, which is started where there is none."""
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'bigdl[ray]'")
    from bigdl.orca.ray import OrcaRayContext

    if ray.is_initialized():
        return OrcaRayContext.get(initialize=False)
    return init_orca_context(runtime="ray", cores=2, object_store_memory="150m")


def stop_ray():
    """Stop the Ray of this process, if there is one; Spark goes on."""
    from bigdl.orca.ray import OrcaRayContext

    OrcaRayContext.stop_of_program()


def rows(count=101, seed=0):
    """Arrays `x` (count, 3) and `y` (count,)."""
    x = np.random.default_rng(seed).normal(size=(count, 3))
    return x, np.sin(x.sum(1))


def model(config):
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 1)
    ).double()


def still(config):
    """The same without random numbers."""
    import torch

    made = model(config)
    made[1] = torch.nn.Identity()
    return made


def optimizer(model, config):
    import torch

    return torch.optim.Adam(model.parameters(), lr=0.05)


def estimator(workers=2, config=None, **options):
    import torch

    from bigdl.orca.learn.pytorch import Estimator

    options = {"model": model, "optimizer": optimizer, "loss": torch.nn.MSELoss(), **options}
    return Estimator.from_torch(
        backend=options.pop("backend", "ray"),
        workers_per_node=workers,
        config={"dtype": "float64", **(config or {})},
        **options,
    )


def weights(est) -> np.ndarray:
    return np.concatenate([v.numpy().ravel() for v in est.get_model().state_dict().values()])
