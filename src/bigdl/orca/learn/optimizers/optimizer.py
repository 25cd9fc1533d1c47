"""The optimizers of BigDL 2.x over those of torch."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod

from bigdl.common.errors import UsageError
from bigdl.orca.learn.optimizers.schedule import Default, Scheduler

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

_LARGEST = sys.float_info.max  # BigDL's "not given"


class Optimizer(ABC):
    """A creator ``optimizer(model, config)``; the parameters keep the names of BigDL 2.x.

    Attributes
    ----------
    schedule : Scheduler or None
        Creator of the scheduler that belongs to it.
    """

    schedule: Scheduler | None = None

    @abstractmethod
    def _build(self, parameters):
        """The torch optimizer."""

    def __call__(self, model, config=None):
        return self._build(model.parameters())

    def get_optimizer(self) -> Optimizer:
        """Return the creator itself (BigDL 2.x returned an object of the JVM)."""
        return self

    def _keep(self, learningrate, decay=0.0, schedule=None):
        if not isinstance(learningrate, int | float) or not learningrate > 0:
            raise UsageError(
                f"{type(self).__name__}: learningrate should be a positive number, got "
                f"{learningrate!r}"
            )
        if schedule is not None and not isinstance(schedule, Scheduler):
            raise UsageError(
                f"{type(self).__name__}: learningrate_schedule should be a schedule of "
                f"bigdl.orca.learn.optimizers.schedule, got {type(schedule).__name__}"
            )
        self.learningrate = learningrate
        if schedule is not None and not isinstance(schedule, Default):
            self.schedule = schedule
        elif decay:
            self.schedule = Default(decay)


class SGD(Optimizer):
    """Gradient descent with momentum.

    Parameters
    ----------
    dampening : float
        Default: equal to `momentum`, or 0 with `nesterov`.
    learningrate_schedule : Scheduler, optional
        Replaces `learningrate_decay`.
    learningrates, weightdecays : None
        Rates of single weights; give a torch optimizer with parameter groups instead.
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
                "SGD: learningrates and weightdecays of single weights are not supported; pass a "
                "torch.optim.SGD with parameter groups"
            )
        if dampening == _LARGEST:
            dampening = 0.0 if nesterov else momentum
        self._keep(learningrate, learningrate_decay, learningrate_schedule)
        self.options = {
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weightdecay,
            "nesterov": nesterov,
        }

    def _build(self, parameters):
        import torch

        return torch.optim.SGD(parameters, lr=self.learningrate, **self.options)


class Adagrad(Optimizer):
    """Adaptive gradient descent."""

    def __init__(self, learningrate=1e-3, learningrate_decay=0.0, weightdecay=0.0):
        self._keep(learningrate)
        self.options = {"lr_decay": learningrate_decay, "weight_decay": weightdecay}

    def _build(self, parameters):
        import torch

        return torch.optim.Adagrad(parameters, lr=self.learningrate, **self.options)


class LBFGS(Optimizer):
    """Accepted by name; distributed training has no use for it and says so."""

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
        self._keep(learningrate)
        self.options = {
            "max_iter": max_iter,
            "max_eval": None if max_eval == _LARGEST else int(max_eval),
            "tolerance_grad": tolfun,
            "tolerance_change": tolx,
            "history_size": ncorrection,
        }

    def _build(self, parameters):
        import torch

        return torch.optim.LBFGS(parameters, lr=self.learningrate, **self.options)


class Adadelta(Optimizer):
    """Adaptive gradient descent without a learning rate."""

    def __init__(self, decayrate=0.9, epsilon=1e-10):
        self._keep(1.0)
        self.options = {"rho": decayrate, "eps": epsilon}

    def _build(self, parameters):
        import torch

        return torch.optim.Adadelta(parameters, lr=self.learningrate, **self.options)


class Adam(Optimizer):
    """Adam."""

    def __init__(
        self, learningrate=1e-3, learningrate_decay=0.0, beta1=0.9, beta2=0.999, epsilon=1e-8
    ):
        self._keep(learningrate, learningrate_decay)
        self.options = {"betas": (beta1, beta2), "eps": epsilon}

    def _build(self, parameters):
        import torch

        return torch.optim.Adam(parameters, lr=self.learningrate, **self.options)


class ParallelAdam(Adam):
    """Adam; `parallel_num` threads of the JVM have no meaning here."""

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
    """Follow the regularized leader."""

    def __init__(
        self,
        learningrate=1e-3,
        learningrate_power=-0.5,
        initial_accumulator_value=0.1,
        l1_regularization_strength=0.0,
        l2_regularization_strength=0.0,
        l2_shrinkage_regularization_strength=0.0,
    ):
        self._keep(learningrate)
        self.options = {
            "power": learningrate_power,
            "start": initial_accumulator_value,
            "l1": l1_regularization_strength,
            "l2": l2_regularization_strength,
            "shrinkage": l2_shrinkage_regularization_strength,
        }

    def _build(self, parameters):
        from bigdl.orca.learn.optimizers.ftrl import TorchFtrl

        return TorchFtrl(parameters, lr=self.learningrate, **self.options)


class Adamax(Optimizer):
    """Adam by the infinity norm."""

    def __init__(self, learningrate=0.002, beta1=0.9, beta2=0.999, epsilon=1e-38):
        self._keep(learningrate)
        self.options = {"betas": (beta1, beta2), "eps": epsilon}

    def _build(self, parameters):
        import torch

        return torch.optim.Adamax(parameters, lr=self.learningrate, **self.options)


class RMSprop(Optimizer):
    """RMSprop."""

    def __init__(self, learningrate=0.01, learningrate_decay=0.0, decayrate=0.99, epsilon=1e-8):
        self._keep(learningrate, learningrate_decay)
        self.options = {"alpha": decayrate, "eps": epsilon}

    def _build(self, parameters):
        import torch

        return torch.optim.RMSprop(parameters, lr=self.learningrate, **self.options)
