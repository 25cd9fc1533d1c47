"""Models that are served in the tests of this folder."""

import threading

import numpy as np
import pytest

from bigdl.nano.serving import ModelRepository, ServedModel, Signature, TensorSpec
from bigdl.nano.serving.runners import Runner


@pytest.fixture(scope="session")
def scale_directory(tmp_path_factory):
    """A function that writes a saved model that multiplies by a factor: its answer says which."""
    import torch

    from bigdl.nano.pytorch import InferenceOptimizer

    class Scale(torch.nn.Module):
        def __init__(self, factor):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.tensor(float(factor)))

        def forward(self, x):
            return x * self.factor

    made = {}

    def write(path, factor):
        if factor not in made:
            made[factor] = InferenceOptimizer.trace(
                Scale(factor), torch.ones(1, 3), accelerator="openvino"
            )
        InferenceOptimizer.save(made[factor], path)
        return path

    return write


class SlowModel:
    """A model that waits until it may go on."""

    def __init__(self):
        self.open, self.entered = threading.Event(), threading.Semaphore(0)
        self.open.set()
        spec = TensorSpec("x", np.dtype("float32"), (-1, 3))
        signature = Signature((spec,), (TensorSpec("y", spec.dtype, spec.shape),))
        self.runner = Runner(self._run, signature, "python")

    def _run(self, arrays):
        self.entered.release()
        assert self.open.wait(60)
        return [arrays[0] * 2]

    def close(self):
        """Let calls wait from now on."""
        while self.entered.acquire(blocking=False):
            pass
        self.open.clear()


@pytest.fixture
def slow_model():
    model = SlowModel()
    yield model
    model.open.set()


@pytest.fixture
def repository_of():
    """A function that returns a repository of models in memory."""

    def make(batching=None, **models):
        repository = ModelRepository()
        for name, model in models.items():
            runner = model.runner if isinstance(model, SlowModel) else model
            repository.add(name, ServedModel(runner, batching=batching))
        return repository

    return make
