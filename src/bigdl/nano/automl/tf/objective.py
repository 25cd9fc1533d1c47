"""Trials of a Keras model: target metric, reports to a pruner, and objective."""

from __future__ import annotations

import copy
import functools
import hmac
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast
from xmlrpc.client import ServerProxy
from xmlrpc.server import SimpleXMLRPCRequestHandler, SimpleXMLRPCServer

import keras

from bigdl.common.errors import UsageError, as_usage_error, require
from bigdl.nano.searchable import suggested
from bigdl.nano.tf.serialization import copied

if TYPE_CHECKING:
    from optuna.trial import Trial

_MODES = ("last", "max", "min", "auto")
_BEST_HIGH = ("acc", "auc", "precision", "recall", "f1", "r2")
_BEST_LOW = ("loss", "mae", "mse", "error")
_VALIDATION = "val_"


@dataclass(frozen=True)
class Target:
    """The metric that a search optimizes.

    Attributes
    ----------
    name : str
        Key in the training's history.
    direction : {"minimize", "maximize"}
    mode : {"last", "max", "min"}
        Value to use: that of the last epoch, or the largest or smallest one.
    """

    name: str
    direction: str
    mode: str

    @classmethod
    def of(
        cls,
        name: str | list[str] | tuple[str, ...] | None,
        mode: str,
        study: Mapping[str, Any],
        compiled: Mapping[str, Any],
        fit: Mapping[str, Any],
    ) -> Target:
        """Create the target from a user's search arguments and check it.

        Parameters
        ----------
        name : str or None
        mode : str
        study : mapping
            Arguments of the study.
        compiled, fit : mapping
            Arguments of ``compile`` and ``fit``.

        Raises
        ------
        UsageError
            If the metric, mode or direction is invalid.
        """
        directions = study.get("directions") or []
        names = name if isinstance(name, list | tuple) else [name]
        if max(len(names), len(directions)) > 1:
            raise UsageError("multiple objective metric is not supported.", code="unsupported")
        name = next(iter(names), None)
        if mode not in _MODES:
            raise UsageError(
                f"target_metric_mode {mode!r} is not recognized; it must be one of "
                f"{', '.join(map(repr, _MODES))}",
                code="argument-value",
                argument="target_metric_mode",
                allowed=list(_MODES),
            )
        metrics = _names(compiled)
        validated = fit.get("validation_data") is not None or bool(fit.get("validation_split"))
        if name is None:
            name = (_VALIDATION if validated else "") + (metrics[0] if metrics else "loss")
        _check_name(name, metrics, validated)
        direction = _direction(name, study.get("direction") or next(iter(directions), None))
        if mode == "auto":
            mode = "max" if direction == "maximize" else "min"
        return cls(name, direction, mode)

    def of_history(self, history: Mapping[str, Sequence[float]]) -> float:
        """Return the metric's value from the history of a training run.

        Raises
        ------
        UsageError
            If the history does not have the metric.
        """
        if self.name not in history:
            raise UsageError(
                f"invalid target metric {self.name!r}: the training reports "
                f"{', '.join(map(repr, history)) or 'nothing'}",
                code="name-unknown",
                metric=self.name,
                allowed=list(history),
            )
        values = [float(value) for value in history[self.name]]
        return {"last": values[-1], "max": max(values), "min": min(values)}[self.mode]


def _names(compiled: Mapping[str, Any]) -> list[str] | None:
    """Return the names of the metrics passed to ``compile``, or None if they are set per output."""
    metrics = compiled.get("metrics") or []
    if not isinstance(metrics, (list, tuple)):
        metrics = [metrics]
    if any(isinstance(metric, (list, tuple, Mapping)) for metric in metrics):
        return None
    return [_name(metric) for metric in metrics]


def _name(metric: object) -> str:
    if isinstance(metric, str):
        return metric
    name: Any = getattr(metric, "name", None)
    return name or getattr(metric, "__name__", type(metric).__name__)


def _check_name(name: str, metrics: list[str] | None, validated: bool) -> None:
    if not isinstance(name, str):
        raise UsageError(
            f"invalid target metric {name!r}; it must be a name",
            code="argument-type",
            argument="target_metric",
        )
    plain = name.removeprefix(_VALIDATION)
    if plain != name and not validated:
        raise UsageError(
            f"invalid target metric {name!r}: there is no validation; give validation_data or "
            "validation_split",
            code="argument-missing",
            argument="validation_data",
            metric=name,
        )
    if plain == "loss" or metrics is None or plain in metrics:
        return
    if not metrics:
        raise UsageError(
            "target metric is should be loss or val_loss if metrics is not provided in compile, "
            f"not {name!r}",
            code="name-unknown",
            metric=name,
        )
    raise UsageError(
        f"invalid target metric {name!r}: compile has the metrics {', '.join(map(repr, metrics))}",
        code="name-unknown",
        metric=name,
        allowed=list(metrics),
    )


def _direction(name: str, direction: object) -> str:
    plain = name.removeprefix(_VALIDATION).lower()
    natural = None
    if any(plain == each or plain.startswith((each, f"{each}_")) for each in _BEST_HIGH):
        natural = "maximize"
    elif plain in _BEST_LOW or plain.endswith(("_loss", "_error")):
        natural = "minimize"
    if direction is None:
        return natural or "minimize"
    wanted = str(getattr(direction, "name", direction)).lower()
    if natural is not None and wanted in ("minimize", "maximize") and wanted != natural:
        raise UsageError(
            f"The direction of target metric {name!r} must be {natural!r}, not {direction!r}",
            code="argument-value",
            argument="direction",
            metric=name,
        )
    return wanted


# Pruning ------------------------------------------------------------------------------------------

Pruning = Callable[[float, int], bool]
"""Function that reports the metric of an epoch and returns True to prune the trial."""


class _EpochReports(keras.callbacks.Callback):
    """Callback that reports each epoch and stops the training of a pruned trial.

    Parameters
    ----------
    should_prune : callable
        Function from :func:`pruning_of`.
    metric : str

    Attributes
    ----------
    epochs : int
        Number of finished epochs.
    pruned : bool
    """

    def __init__(self, should_prune: Pruning, metric: str):
        super().__init__()
        self._should_prune, self._metric = should_prune, metric
        self.epochs, self.pruned = 0, False

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.epochs = epoch + 1
        value = (logs or {}).get(self._metric)
        if value is not None and self._should_prune(float(value), epoch):
            self.pruned = self.model.stop_training = True


@contextmanager
def pruning_of(trial: Trial, in_processes: bool) -> Iterator[Pruning]:
    """Context manager that yields a function to report a metric and check whether to prune.

    Parameters
    ----------
    trial : optuna.trial.Trial
    in_processes : bool
        The function is sent to another process of this machine and called there. It calls back
        into this process, which has the trial and perhaps its in-memory study, over XML-RPC. The
        XML-RPC server listens on the loopback address, requires the secret random path in its URL,
        and stops with the trial.
    """

    def should_prune(value: Any, epoch: Any) -> bool:
        trial.report(value, epoch)
        return trial.should_prune()

    if not in_processes:
        yield should_prune
        return
    path = f"/{secrets.token_hex()}"

    class CallsOfThisTrial(SimpleXMLRPCRequestHandler):
        def is_rpc_path_valid(self) -> bool:
            return hmac.compare_digest(self.path.encode(), path.encode())

    with SimpleXMLRPCServer(("127.0.0.1", 0), CallsOfThisTrial, logRequests=False) as server:
        server.register_function(should_prune)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield functools.partial(
                _report_remotely, f"http://127.0.0.1:{server.server_address[1]}{path}"
            )
        finally:
            server.shutdown()
            thread.join()


def _report_remotely(address: str, value: float, epoch: int) -> bool:
    """Report an epoch's metric to the process that runs the trial."""
    with ServerProxy(address) as process:
        return cast("bool", process.should_prune(value, epoch))


# The objective ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KerasObjective:
    """Objective that builds a trial's model, trains it, and returns the target metric.

    Processes of a parallel search receive it pickled.

    Attributes
    ----------
    subject : dict
        The lazy ``model``, and the arguments of ``compile`` and ``fit``.
    target : Target
    """

    subject: dict[str, Any]
    target: Target

    def __call__(self, trial: Trial) -> float:
        made = suggested(self.subject, trial)
        model = compiled(made)
        fit = {"verbose": 0, **made["fit"]}
        several = (fit.get("num_processes") or 1) != 1
        with pruning_of(trial, in_processes=several) as should_prune:
            report = _EpochReports(should_prune, self.target.name)
            fit["callbacks"] = [*_copies(fit.get("callbacks")), report]
            history = model.fit(**fit)
        if report.pruned:
            raise require("optuna", "automl").TrialPruned(f"pruned after {report.epochs} epochs")
        return self.target.of_history(history.history)


def _copies(callbacks: object) -> list[Any]:
    """Return copies of the callbacks for one trial, since concurrent trials must not share them."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        callbacks = callbacks.callbacks
    each_callback = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    originals = [each for each in each_callback if each is not None]
    # Do not copy the models that the callbacks were used with before.
    models = {id(getattr(each, "_model", None)): None for each in originals}
    sentence = "Each trial needs copies of the callbacks, but one cannot be copied"
    with as_usage_error(sentence, "; pass callbacks that were not used before", code="model-copy"):
        return copy.deepcopy(originals, models)


def compiled(made: Mapping[str, Any]) -> keras.Model:
    """Return the compiled model of a trial.

    Parameters
    ----------
    made : mapping
        The ``model``, and the arguments of ``compile``, with all spaces chosen.

    Returns
    -------
    keras.Model
        Model that shares no weights, optimizer or metric with another trial's.
    """
    model, arguments = made["model"], made["compile"]
    if arguments:
        model.compile(**copied(arguments))
    return model
