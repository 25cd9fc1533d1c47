"""The search of a Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.nano.automl.pytorch.objective import LATENCY, TrainerObjective
from bigdl.nano.automl.searching import SearchArguments, Searches

__all__ = ["HPOSearcher"]

_OF_FIT = ("train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path")
_MODES = ("best", "last")


class HPOSearcher(Searches):
    """Searches the hyper-parameters of models that a Trainer trains.

    Each trial trains a model of its own with a trainer of its own, which has the arguments of the
    Trainer and copies of its callbacks. Progress bars, summaries, Lightning's default logger and
    default checkpoints are left out of trials unless the Trainer asks for them.

    Parameters
    ----------
    trainer : Trainer
        Made with ``use_hpo=True``.
    num_processes : int
        Processes that train one trial's model together; by default as the Trainer says.

    Raises
    ------
    UsageError
        If the Trainer was made without ``use_hpo=True``.
    """

    def __init__(self, trainer: Any, num_processes: int | None = None):
        super().__init__()
        if not getattr(trainer, "hpo_arguments", None):
            raise UsageError("HPOSearcher needs a Trainer that was made with use_hpo=True")
        self._arguments = dict(trainer.hpo_arguments)
        if num_processes is not None:
            self._arguments["num_processes"] = num_processes
        self._subject: Any = None

    def search(
        self,
        model: Any,
        resume: bool = False,
        target_metric: str | Sequence[str] | None = None,
        mode: str = "best",
        n_parallels: int = 1,
        acceleration: bool = False,
        input_sample: Any = None,
        max_epochs: int | None = None,
        **kwargs: Any,
    ) -> Any:
        """Train models with different hyper-parameters; see :meth:`Trainer.search`."""
        arguments = SearchArguments.of(kwargs, _OF_FIT)
        metrics = _metrics(target_metric)
        self._check(arguments, metrics, mode, n_parallels)
        data = {name: value for name, value in arguments.rest.items() if value is not None}
        objective = TrainerObjective(
            model=model,
            data=data,
            trainer=self._arguments | ({} if max_epochs is None else {"max_epochs": max_epochs}),
            metrics=metrics,
            directions=arguments.directions(metrics),
            mode=mode,
            acceleration=acceleration,
            input_sample=input_sample,
        )
        self._last.open(objective.subject, arguments, metrics, resume=resume)
        self._subject = objective.subject
        self._last.run(objective, arguments, n_parallels)
        return self.study.best_trials if len(metrics) > 1 else self.end_search()

    def end_search(self, use_trial_id: int = -1) -> Any:
        return self._last.best(self._subject, use_trial_id)["model"]

    def _check(
        self, arguments: SearchArguments, metrics: list[str], mode: str, n_parallels: int
    ) -> None:
        if mode not in _MODES:
            raise UsageError(f"mode must be 'best' or 'last', not {mode!r}")
        in_memory = arguments.study.get("storage") is None
        if n_parallels != 1 and in_memory:
            raise UsageError(
                "parallel search is not supported when in-mem storage is used (n_parallels must be "
                "1); give a storage such as 'sqlite:///search.db'"
            )
        if arguments.study.get("pruner") is None:
            return
        if len(metrics) > 1:
            raise UsageError("Trials with several metrics cannot be pruned; leave out pruner")
        if metrics == [LATENCY]:
            raise UsageError("Trials that are judged by latency have no epochs to prune by")
        if (self._arguments.get("num_processes") or 1) > 1:
            raise UsageError(
                "Trials that are trained by several processes cannot be pruned; leave out pruner, "
                "or search with n_parallels processes and num_processes=1"
            )


def _metrics(target_metric: Any) -> list[str]:
    metrics = [target_metric] if isinstance(target_metric, str) else list(target_metric or ())
    if not metrics or not all(isinstance(metric, str) for metric in metrics):
        raise UsageError(
            "target_metric must be the name of a figure that the model logs, or a list of names, "
            f"not {target_metric!r}"
        )
    if len(set(metrics)) < len(metrics):
        raise UsageError(f"target_metric names a metric twice: {metrics}")
    return metrics
