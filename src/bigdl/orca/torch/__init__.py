"""Sharded embeddings for PyTorch, their optimizer, and the model wrappers of BigDL 2.x.

Programs for BigDL 2.x create a TorchModel, TorchLoss or TorchOptim before training, because BigDL
2.x passed the model to the JVM. Here these wrappers only hold the wrapped object; every
argument that takes a model, loss or optimizer unwraps them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from bigdl.common.errors import UsageError, require

require("torch", "orca")  # everything in this module needs torch

from bigdl.orca.learn.optimizers.rowwise_adagrad import RowwiseAdagrad  # noqa: E402
from bigdl.training.embedding_tables.growing import GrowingEmbedding  # noqa: E402
from bigdl.training.embedding_tables.sharded import ShardedEmbedding  # noqa: E402
from bigdl.training.state import dumps  # noqa: E402

if TYPE_CHECKING:
    import torch

__all__ = [
    "GrowingEmbedding",
    "RowwiseAdagrad",
    "ShardedEmbedding",
    "TorchLoss",
    "TorchModel",
    "TorchOptim",
]

_DECAYS = {"EpochDecay": "epoch", "IterationDecay": "batch", "EpochDecayByScore": "epoch"}


class TorchModel:
    """Wrapper of a PyTorch module, for programs written for BigDL 2.x.

    Create it with :meth:`from_pytorch`. Calling it calls the module.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.torch import TorchModel
    >>> model = TorchModel.from_pytorch(torch.nn.ReLU())
    >>> model.predict(np.array([[-1.0, 2.0]], dtype="float32"))
    array([[0., 2.]], dtype=float32)
    """

    def __init__(self, module):
        self._module = module

    @classmethod
    def from_pytorch(cls, input: torch.nn.Module | Callable[[], torch.nn.Module]) -> TorchModel:
        """Wrap a module, or the module that a function without arguments returns."""
        torch = require("torch", "orca")
        module = input
        if not isinstance(module, torch.nn.Module) and callable(module):
            module = module()
        if not isinstance(module, torch.nn.Module):
            raise UsageError(
                "TorchModel.from_pytorch takes an nn.Module or a function that returns one, got "
                f"{input!r}",
                code="model-type",
                argument="input",
            )
        return cls(module)

    def to_pytorch(self):
        """Return the wrapped module."""
        return self._module

    def __call__(self, *inputs):
        return self._module(*inputs)

    def predict(self, x, batch_size: int = 32):
        """Return the model's outputs for arrays of rows, computed on the driver.

        Parameters
        ----------
        x : ndarray or list of ndarray
            One array per input of the model.
        batch_size : int

        Returns
        -------
        ndarray or list of ndarray
        """
        from bigdl.orca.inference import InferenceModel

        return InferenceModel().load_module(self._module).predict(x, batch_size=batch_size)

    def saveModel(self, path: str, over_write: bool = False) -> None:
        """Pickle the whole module to a local file."""
        if os.path.exists(path) and not over_write:
            raise UsageError(
                f"The file {path!r} exists; pass over_write=True to replace it",
                code="path-exists",
                path=path,
            )
        content = dumps(self._module)  # pickle first, so that a failure leaves no file
        Path(path).write_bytes(content)

    @staticmethod
    def loadModel(path: str, *, trust: bool = False) -> TorchModel:
        """Load a module that :meth:`saveModel` wrote.

        Parameters
        ----------
        path : str
        trust : bool
            Confirm with ``trust=True`` that the file is safe: a pickle can run arbitrary code.
        """
        from bigdl.orca.inference.runtimes import read_model, torch_module

        return TorchModel(torch_module(read_model(path), path, trust))


class TorchLoss:
    """Wrapper of a PyTorch loss, for programs written for BigDL 2.x.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.torch import TorchLoss
    >>> loss = TorchLoss.from_pytorch(torch.nn.MSELoss())
    >>> loss.to_pytorch()
    MSELoss()
    """

    def __init__(self, criterion):
        self._criterion = criterion

    @classmethod
    def from_pytorch(cls, criterion: Callable[..., torch.Tensor]) -> TorchLoss:
        """Wrap a loss module, or a function of (output, target)."""
        if isinstance(criterion, type) or not callable(criterion):
            raise UsageError(
                "TorchLoss.from_pytorch takes a loss such as torch.nn.MSELoss() or a function of "
                f"(output, target), got {criterion!r}",
                code="argument-type",
                argument="criterion",
            )
        return cls(criterion)

    def to_pytorch(self):
        """Return the wrapped loss."""
        return self._criterion

    def __call__(self, output, target):
        return self._criterion(output, target)


class TorchOptim:
    """Wrapper of a PyTorch optimizer and optional scheduler, for programs written for BigDL 2.x.

    Attributes
    ----------
    optimizer : torch.optim.Optimizer
    scheduler_creator : callable or None
        ``f(optimizer, config)``.
    step_frequency : str
        ``"epoch"`` or ``"batch"``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.torch import TorchOptim
    >>> sgd = torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1)
    >>> schedule = torch.optim.lr_scheduler.StepLR(sgd, step_size=10)
    >>> TorchOptim.from_pytorch(schedule, decayType="IterationDecay").step_frequency
    'batch'
    """

    def __init__(self, optimizer, scheduler_creator, step_frequency: str):
        self.optimizer = optimizer
        self.scheduler_creator = scheduler_creator
        self.step_frequency = step_frequency

    @classmethod
    def from_pytorch(cls, optim: object, decayType: str = "EpochDecay") -> TorchOptim:
        """Wrap an optimizer, or a scheduler together with its optimizer.

        Parameters
        ----------
        optim : torch.optim.Optimizer or torch.optim.lr_scheduler.LRScheduler
        decayType : str
            When a scheduler is stepped: ``"EpochDecay"``, ``"IterationDecay"`` or, for
            ``ReduceLROnPlateau``, ``"EpochDecayByScore"``.
        """
        torch = require("torch", "orca")
        if decayType not in _DECAYS:
            raise UsageError(
                f"decayType must be one of {', '.join(_DECAYS)}, got {decayType!r}",
                code="argument-value",
                argument="decayType",
                allowed=list(_DECAYS),
            )
        if isinstance(optim, torch.optim.lr_scheduler.LRScheduler):
            return cls(optim.optimizer, _Rebound(optim), _DECAYS[decayType])
        if not isinstance(optim, torch.optim.Optimizer):
            raise UsageError(
                "TorchOptim.from_pytorch takes an optimizer or a scheduler of torch, "
                f"got {optim!r}",
                code="argument-type",
                argument="optim",
            )
        return cls(optim, None, _DECAYS[decayType])


class _Rebound:
    """A scheduler creator that copies a scheduler's state onto another optimizer."""

    def __init__(self, scheduler):
        state = {k: v for k, v in vars(scheduler).items() if k != "optimizer"}
        self._cls, self._state = type(scheduler), state

    def __call__(self, optimizer, config):
        import copy

        from torch.optim.lr_scheduler import LambdaLR

        rates = [group["lr"] for group in optimizer.param_groups]
        # torch warns about an optimizer that never had a scheduler
        LambdaLR(optimizer, lambda step: 1.0)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        scheduler = self._cls.__new__(self._cls)
        vars(scheduler).update(copy.deepcopy(self._state), optimizer=optimizer)
        return scheduler
