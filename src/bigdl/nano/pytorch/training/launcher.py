"""A fit in several processes, after which trainer and model are as if it had run here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from lightning_fabric.utilities.seed import _collect_rng_states, _set_rng_states, reset_seed
from pytorch_lightning import LightningModule
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies.launchers.launcher import _Launcher
from pytorch_lightning.trainer.states import TrainerFn

from bigdl.nano.pytorch.training.shares import share_rows
from bigdl.nano.pytorch.training.travel import Belongings, Changes

__all__ = ["FitLauncher"]

_OF_LIGHTNING = frozenset(vars(LightningModule()))


class FitLauncher(_Launcher):
    """Runs fits in the processes of a strategy, and everything else in this one.

    Parameters
    ----------
    strategy : ProcessesStrategy
    """

    is_interactive_compatible = True

    def __init__(self, strategy):
        self._strategy = strategy

    def launch(self, function: Callable, *args: Any, trainer=None, **kwargs: Any) -> Any:
        """Call ``function(*args, **kwargs)``: a stage of a trainer."""
        if trainer is None or trainer.state.fn != TrainerFn.FITTING:
            return function(*args, **kwargs)
        belongings = _belongings(trainer)
        self._strategy.fitted_on = None  # it need not travel
        order = (function, trainer, args, kwargs, _Globals())
        content = self._strategy.processes.run(_fit, *order)[0]
        home = belongings.loads(content)
        Changes.apply(belongings, home["changes"])
        _restore(trainer, belongings, home)
        self._strategy.fitted_on = _source(*args)
        return None

    def kill(self, signum: Any) -> None:
        """Nothing: no process outlives :meth:`launch`."""


class _Globals:
    """What is global in this process and a fit depends on."""

    def __init__(self) -> None:
        self._deterministic = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )
        self._random = _collect_rng_states(include_cuda=False)

    def restore(self) -> None:
        enabled, warn_only = self._deterministic
        torch.use_deterministic_algorithms(enabled, warn_only=warn_only)
        _set_rng_states(self._random)


def _fit(
    rank: int, function: Callable, trainer, args: tuple, kwargs: dict, state: _Globals
) -> bytes | None:
    """A fit in one of the processes; what rank 0 brings home."""
    strategy = trainer.strategy
    strategy.cluster_environment.join(rank, strategy.processes.count)
    state.restore()
    reset_seed()
    module = trainer.lightning_module
    belongings = _belongings(trainer)
    changes = Changes(belongings, _user_callbacks(trainer), _OF_LIGHTNING - {"training"})
    share_rows(trainer)
    with _SharedFigures(module):
        function(*args, **kwargs)
    if rank:
        # Metrics of a module may meet in its state.
        module.state_dict()
        return None
    return _packed(belongings, changes, trainer)


def _source(model, train_dataloaders=None, val_dataloaders=None, datamodule=None, *_: Any) -> Any:
    """What the batches of a fit come from, of the arguments of Lightning's stage."""
    given = (train_dataloaders, datamodule, model)
    return next(source for source in given if source is not None)


def _belongings(trainer) -> Belongings:
    module = trainer.lightning_module
    owned = {
        f"attribute {name}": value
        for name, value in vars(module).items()
        if isinstance(value, (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler))
    }
    return Belongings({"model": module, "trainer": trainer, **_callbacks(trainer), **owned})


def _callbacks(trainer) -> dict[str, Callback]:
    return {f"callback {place}": each for place, each in enumerate(trainer.callbacks)}


def _user_callbacks(trainer) -> dict[str, Callback]:
    """Those whose attributes may be anything; Lightning's own have a state."""
    return {
        name: each
        for name, each in _callbacks(trainer).items()
        if not type(each).__module__.startswith("pytorch_lightning.")
    }


def _packed(belongings: Belongings, changes: Changes, trainer) -> bytes:
    trainer.lightning_module.state_dict()
    connector = trainer._logger_connector
    home = {
        "changes": changes.collect(),
        "state": trainer.state,
        "figures": [connector.callback_metrics, connector.logged_metrics],
        "bar": connector.progress_bar_metrics,
        "callbacks": [each.state_dict() for each in trainer.callbacks],
        "fit_loop": trainer.fit_loop.state_dict(),
        "max_epochs": trainer.fit_loop.max_epochs,
        "should_stop": trainer.should_stop,
        "settings": trainer.strategy.settings,
        "owned": {
            name: value.__getstate__()
            for name, value in belongings.roots.items()
            if name.startswith("attribute ")
        },
        "random": _collect_rng_states(include_cuda=False),
    }
    optimizers = (trainer.strategy.optimizers, trainer.strategy.lr_scheduler_configs)
    try:
        return belongings.dumps(home | {"optimizers": optimizers})
    except Exception:  # optimizers and schedulers of the user's own making
        return belongings.dumps(home | {"optimizers": ([], [])})


def _restore(trainer, belongings: Belongings, home: dict[str, Any]) -> None:
    connector = trainer._logger_connector
    for own, figures in zip(
        (connector.callback_metrics, connector.logged_metrics, connector.progress_bar_metrics),
        (*home["figures"], home["bar"]),
        strict=True,
    ):
        own.update(figures)
    for callback, state in zip(trainer.callbacks, home["callbacks"], strict=False):
        if state:
            callback.load_state_dict(state)
    for name, state in home["owned"].items():
        vars(belongings.roots[name]).update(state)
    loop = trainer.fit_loop
    loop.load_state_dict(home["fit_loop"])
    loop.restarting = False  # it goes on, and has not come from a file
    loop.max_epochs = home["max_epochs"]
    trainer.should_stop = home["should_stop"]
    strategy = trainer.strategy
    strategy.optimizers, strategy.lr_scheduler_configs = home["optimizers"]
    strategy.settings = home["settings"]
    trainer.state = home["state"]
    _set_rng_states(home["random"])


class _SharedFigures:
    """While it is entered, figures of a validation are those of all processes by default."""

    def __init__(self, module: LightningModule):
        self._module = module

    def __enter__(self) -> None:
        log = self._module.log

        signature = inspect.signature(log)

        @functools.wraps(log)
        def log_together(*args: Any, **kwargs: Any) -> None:
            given = signature.bind(*args, **kwargs).arguments
            given.setdefault("sync_dist", self._is_of_an_epoch(given))
            log(**given)

        self._module.__dict__["log"] = log_together

    def __exit__(self, *exception) -> None:
        del self._module.__dict__["log"]

    def _is_of_an_epoch(self, given: Mapping[str, Any]) -> bool:
        trainer = self._module.trainer
        of_epoch = given.get("on_epoch")
        if of_epoch is None:
            of_epoch = trainer.validating or trainer.sanity_checking
        return bool(of_epoch and not given.get("on_step") and not given.get("rank_zero_only"))
