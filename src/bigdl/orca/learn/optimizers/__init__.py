"""Optimizers under their BigDL 2.x names, as factories of torch optimizers.

In ``Estimator.from_torch(optimizer=Adam(learningrate=1e-3))`` the workers call the instance with
the model to create the torch optimizer and its learning rate schedule.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from bigdl.common.checks import check_number
from bigdl.common.errors import UsageError
from bigdl.orca.learn.optimizers.schedule import Default, Scheduler

if TYPE_CHECKING:
    import torch

__all__ = [
    "LBFGS",
    "SGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "Adamax",
    "Ftrl",
    "Optimizer",
    "ParallelAdam",
    "RMSprop",
]

_LARGEST = sys.float_info.max  # default that means "not set" in BigDL


class Optimizer:
    """Base class of optimizer factories with BigDL 2.x parameters, called as ``f(model, config)``.

    Attributes
    ----------
    schedule : Scheduler or None
        Factory of the learning rate scheduler.

    Examples
    --------
    Pass an optimizer of this module to an Estimator, which calls it on the workers:

    >>> import torch
    >>> from bigdl.orca.learn.optimizers import RMSprop
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(2, 1),
    ...     optimizer=RMSprop(learningrate=0.01),
    ...     loss=torch.nn.MSELoss(),
    ... )
    >>> type(RMSprop(learningrate=0.01)(torch.nn.Linear(2, 1), {}))
    <class 'torch.optim.rmsprop.RMSprop'>
    """

    schedule: Scheduler | None = None

    def __init__(
        self,
        torch_name: str,
        learningrate: float,
        decay: float = 0.0,
        schedule: Scheduler | None = None,
        **options: Any,  # of torch's class
    ):
        name = type(self).__name__
        self.learningrate = check_number(f"{name}: learningrate", learningrate, above=0)
        if schedule is not None and not isinstance(schedule, Scheduler):
            raise UsageError(
                f"{name}: learningrate_schedule should be a schedule of "
                f"bigdl.orca.learn.optimizers.schedule, got {type(schedule).__name__}",
                code="argument-type",
                argument="learningrate_schedule",
            )
        if schedule is not None and not isinstance(schedule, Default):
            self.schedule = schedule
        elif decay:
            self.schedule = Default(decay)
        self._torch_name, self.options = torch_name, options

    def __call__(self, model: torch.nn.Module, config: dict | None = None) -> torch.optim.Optimizer:
        from torch import optim

        from bigdl.orca.learn.optimizers.ftrl import TorchFtrl

        cls = TorchFtrl if self._torch_name == "Ftrl" else getattr(optim, self._torch_name)
        return cls(model.parameters(), lr=self.learningrate, **self.options)

    def get_optimizer(self) -> Optimizer:
        """Return this object itself (BigDL 2.x returned a JVM object)."""
        return self


class SGD(Optimizer):
    """Stochastic gradient descent with momentum.

    Parameters
    ----------
    dampening : float
        Default: `momentum`, or 0 with `nesterov`.
    learningrate_schedule : Scheduler, optional
        Overrides `learningrate_decay`.
    learningrates, weightdecays : None
        Per-weight rates are not supported; pass a torch optimizer with parameter groups.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import SGD
    >>> optimizer = SGD(learningrate=0.1, momentum=0.9)(torch.nn.Linear(2, 1), {})
    >>> optimizer.defaults["lr"], optimizer.defaults["momentum"]
    (0.1, 0.9)
    """

    def __init__(
        self,
        learningrate=1e-3,
        learningrate_decay=0.0,
        weightdecay=0.0,
        momentum=0.0,
        dampening=_LARGEST,
        nesterov=False,
        learningrate_schedule=None,
        learningrates=None,
        weightdecays=None,
    ):
        if learningrates is not None or weightdecays is not None:
            raise UsageError(
                "SGD: per-weight learningrates and weightdecays are not supported; pass a "
                "torch.optim.SGD with parameter groups",
                code="unsupported",
            )
        if dampening == _LARGEST:
            dampening = 0.0 if nesterov else momentum
        super().__init__(
            "SGD",
            learningrate,
            learningrate_decay,
            learningrate_schedule,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weightdecay,
            nesterov=nesterov,
        )


class Adagrad(Optimizer):
    """Adagrad optimizer.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import Adagrad
    >>> Adagrad(learningrate=0.1)(torch.nn.Linear(2, 1), {}).defaults["lr"]
    0.1
    """

    def __init__(self, learningrate=1e-3, learningrate_decay=0.0, weightdecay=0.0):
        super().__init__(
            "Adagrad", learningrate, lr_decay=learningrate_decay, weight_decay=weightdecay
        )


class LBFGS(Optimizer):
    """L-BFGS, for single-process use; distributed training raises an error.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import LBFGS
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> estimator = Estimator.from_torch(
    ...     model=torch.nn.Linear(1, 1), optimizer=LBFGS(), loss=torch.nn.MSELoss(), backend="local"
    ... )
    >>> try:
    ...     estimator.fit({"x": np.ones((8, 1), "float32"), "y": np.ones((8, 1), "float32")})
    ... except ValueError as error:
    ...     print(error)
    LBFGS ...
    """

    def __init__(
        self,
        max_iter=20,
        max_eval=_LARGEST,
        tolfun=1e-5,
        tolx=1e-9,
        ncorrection=100,
        learningrate=1.0,
        verbose=False,
        linesearch=None,
        linesearch_options=None,
    ):
        super().__init__(
            "LBFGS",
            learningrate,
            max_iter=max_iter,
            max_eval=None if max_eval == _LARGEST else int(max_eval),
            tolerance_grad=tolfun,
            tolerance_change=tolx,
            history_size=ncorrection,
        )


class Adadelta(Optimizer):
    """Adadelta optimizer, which needs no learning rate.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import Adadelta
    >>> Adadelta(decayrate=0.95)(torch.nn.Linear(2, 1), {}).defaults["rho"]
    0.95
    """

    def __init__(self, decayrate=0.9, epsilon=1e-10):
        super().__init__("Adadelta", 1.0, rho=decayrate, eps=epsilon)


class Adam(Optimizer):
    """Adam optimizer.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import Adam
    >>> Adam(learningrate=0.01, beta1=0.8)(torch.nn.Linear(2, 1), {}).defaults["betas"]
    (0.8, 0.999)
    """

    def __init__(
        self, learningrate=1e-3, learningrate_decay=0.0, beta1=0.9, beta2=0.999, epsilon=1e-8
    ):
        super().__init__(
            "Adam", learningrate, learningrate_decay, betas=(beta1, beta2), eps=epsilon
        )


class ParallelAdam(Adam):
    """Adam optimizer; `parallel_num` is accepted for compatibility and ignored.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import ParallelAdam
    >>> type(ParallelAdam(learningrate=0.01)(torch.nn.Linear(2, 1), {}))
    <class 'torch.optim.adam.Adam'>
    """

    def __init__(
        self,
        learningrate=1e-3,
        learningrate_decay=0.0,
        beta1=0.9,
        beta2=0.999,
        epsilon=1e-8,
        parallel_num=-1,
    ):
        super().__init__(learningrate, learningrate_decay, beta1, beta2, epsilon)


class Ftrl(Optimizer):
    """FTRL-proximal optimizer (follow the regularized leader).

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import Ftrl
    >>> creator = Ftrl(learningrate=0.1, l1_regularization_strength=0.01)
    >>> creator(torch.nn.Linear(2, 1), {}).param_groups[0]["lr"]
    0.1
    """

    def __init__(
        self,
        learningrate=1e-3,
        learningrate_power=-0.5,
        initial_accumulator_value=0.1,
        l1_regularization_strength=0.0,
        l2_regularization_strength=0.0,
        l2_shrinkage_regularization_strength=0.0,
    ):
        super().__init__(
            "Ftrl",
            learningrate,
            power=learningrate_power,
            start=initial_accumulator_value,
            l1=l1_regularization_strength,
            l2=l2_regularization_strength,
            shrinkage=l2_shrinkage_regularization_strength,
        )


class Adamax(Optimizer):
    """Adamax optimizer: Adam with the infinity norm.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import Adamax
    >>> Adamax()(torch.nn.Linear(2, 1), {}).defaults["lr"]
    0.002
    """

    def __init__(self, learningrate=0.002, beta1=0.9, beta2=0.999, epsilon=1e-38):
        super().__init__("Adamax", learningrate, betas=(beta1, beta2), eps=epsilon)


class RMSprop(Optimizer):
    """RMSprop optimizer.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.optimizers import RMSprop
    >>> RMSprop(decayrate=0.9)(torch.nn.Linear(2, 1), {}).defaults["alpha"]
    0.9
    """

    def __init__(self, learningrate=0.01, learningrate_decay=0.0, decayrate=0.99, epsilon=1e-8):
        super().__init__("RMSprop", learningrate, learningrate_decay, alpha=decayrate, eps=epsilon)
