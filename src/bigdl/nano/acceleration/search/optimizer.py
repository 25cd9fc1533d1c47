"""The part of InferenceOptimizer that tries many methods, whatever the framework is."""

from __future__ import annotations

import abc
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.method import ORIGINAL, Method
from bigdl.nano.acceleration.search.cache import Cache
from bigdl.nano.acceleration.search.isolation import Limits, search
from bigdl.nano.acceleration.search.report import Progress, render, write_chart
from bigdl.nano.acceleration.search.results import (
    ACCELERATORS,
    PRECISIONS,
    Results,
    check_member,
    fits,
)
from bigdl.nano.acceleration.search.trial import Bench, Plan, Trial

if TYPE_CHECKING:
    import pandas

__all__ = ["BaseInferenceOptimizer", "check_counts", "check_direction"]

Model = TypeVar("Model")


class BaseInferenceOptimizer(abc.ABC, Generic[Model]):
    """Tries methods on a model and keeps their results.

    A framework's class has a method ``optimize``, which makes a bench and calls :meth:`_search`.
    """

    _methods: ClassVar[Mapping[str, Method]]
    """All methods of the framework."""
    _data_argument: ClassVar[str]
    """Name of the argument of ``optimize`` that holds the inputs."""

    _results: Results | None = None
    _bench: Bench
    _models: dict[str, Model]

    def summary(self) -> None:
        """Print the table of methods.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called.
        """
        print(render(self._searched("result", "summary")))

    def results(self) -> pandas.DataFrame:
        """Return all figures of the search.

        Returns
        -------
        pandas.DataFrame
            One row for each method, by name, with columns ``status``, ``reason``, ``latency``
            (ms), ``speedup``, ``throughput`` (samples/s), ``accuracy``, ``difference`` (from the
            original's result, relative), ``memory`` (MB), ``threads``, ``saved``, ``seconds``.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called.
        """
        return self._searched("result", "results").to_pandas()

    def plot(self, path: Any) -> None:
        """Draw the methods that work, by latency and accuracy.

        Parameters
        ----------
        path : str or path
            ``.html`` or ``.svg``, or what matplotlib writes, e.g. ``.png``, if it is installed.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called, or the file cannot be written.
        """
        precisions = {name: method.precision for name, method in self._methods.items()}
        write_chart(self._searched("result", "plot"), Path(path), precisions)

    @property
    def optimized_model_dict(self) -> Mapping[str, Mapping[str, Any]]:
        """For each method ``"status"``, ``"latency"`` (ms), ``"accuracy"`` and ``"model"``.

        The model is loaded when it is asked for; it is None where a method failed.
        """
        return {name: _ModelRow(self, trial) for name, trial in (self._results or {}).items()}

    def get_model(self, method_name: str) -> Model:
        """Return the model that a method made.

        Parameters
        ----------
        method_name : str

        Returns
        -------
        model
            Ready for inference; for ``"original"`` the user's own.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called, or there is no such method, or it was not tried or
            failed.
        """
        results = self._searched("model", "get_model")
        if method_name not in self._methods:
            raise UsageError(
                f"There is no method {method_name!r}; choose one of {', '.join(self._methods)}"
            )
        trial = results.get(method_name)
        if trial is None or not trial.usable:
            why = "it was not tried" if trial is None else f"{trial.status}: {trial.reason}"
            raise UsageError(
                "Unable to get the specified model as it doesn't exist in optimized_model_dict. "
                f"Method {method_name!r}: {why}"
            )
        if method_name not in self._models:
            self._models[method_name] = self._loaded(results, trial)
        return self._models[method_name]

    def _best(
        self,
        accelerator: str | None,
        precision: str | None,
        use_ipex: bool | None,
        accuracy_criterion: float | None,
    ) -> tuple[Model, str]:
        """Return the best model of this kind, and its method's option."""
        results = self._searched("model", "get_best_model")
        check_member("accelerator", accelerator, ACCELERATORS)
        check_member("precision", precision, PRECISIONS)
        results.check_criterion(accuracy_criterion)
        restrictions = (
            None if accelerator is None else (accelerator,),
            None if precision is None else (precision,),
            use_ipex,
        )
        related = [
            name
            for name, trial in results.items()
            if trial.usable and fits(self._methods[name], *restrictions)
        ]
        if not related:
            raise UsageError("Don't find related model in optimize's results.")
        kept = [name for name in related if results.keeps_accuracy(name, accuracy_criterion)]
        if not kept:
            warnings.warn(
                "No model of this kind keeps the accuracy of the original within "
                f"{accuracy_criterion:.3g} of its value, so the original is returned",
                stacklevel=3,
            )
        best = results.best(kept) or ORIGINAL
        return self.get_model(best), self._methods[best].option

    def _loaded(self, results: Results, trial: Trial) -> Model:
        if trial.method == ORIGINAL:
            return self._original(trial)
        directory = results.directory / trial.method
        if trial.saved and directory.exists():
            return self._read(directory)
        return self._bench.build(self._methods[trial.method], trial.threads).model

    @abc.abstractmethod
    def _original(self, trial: Trial) -> Model:
        """Return the user's model, as it is returned if nothing is better."""

    @abc.abstractmethod
    def _read(self, directory: Path) -> Model:
        """Return a model that a trial has saved."""

    def _searched(self, wanted: str, caller: str) -> Results:
        if self._results is None:
            noun = "optimization result" if wanted == "result" else "optimized model"
            raise UsageError(f"There is no {noun}. You should call .optimize() before {caller}()")
        return self._results

    def _search(
        self,
        bench: Bench,
        plan: Plan,
        direction: str,
        *,
        limits: Limits,
        threads: int,
        logging: bool,
        output_filename: str | None,
        cache: Cache,
        key: str | None = None,
        reuse: bool = True,
    ) -> None:
        """Try the methods of a bench, keep the results and print their table.

        Parameters
        ----------
        bench : Bench
        plan : Plan
        direction : {"max", "min"}
        limits : Limits
        threads : int
            Threads of the numeric libraries of the process in which methods are tried.
        logging : bool
            True to show the output of that process, and a progress bar.
        output_filename : str or None
            File for the table.
        cache : Cache
        key : str or None
            Key of the search in the cache; None keeps it out of the cache.
        reuse : bool
            True to take the results of an equal search from the cache.
        """
        began = time.monotonic()
        results = cache.find(key) if reuse else None
        if results is None:
            results = Results([], cache.new_directory(), direction, plan.objective)
            with Progress(len(bench.methods), logging) as progress:
                trials = search(
                    bench,
                    list(bench.methods),
                    plan,
                    limits,
                    results.directory,
                    threads=threads,
                    show=logging,
                    progress=progress,
                )
            self._check_original(trials[0])
            results.add(trials)
            cache.put(key, results)
        else:
            print("An equal search was made before; pass cache=False to make it again.")
        self._results, self._bench, self._models = results, bench, {}
        self.summary()
        print(f"Optimization cost {time.monotonic() - began:.1f}s in total.")
        if output_filename is not None:
            _write_text(output_filename, render(results))

    def _check_original(self, trial: Trial) -> None:
        if trial.usable:
            return
        if trial.stage == "score":
            raise UsageError(
                "Your metric is incompatible with validation_data, or with the model: "
                f"{trial.reason}; a metric of the parameters pred and target takes the model's "
                "result and what comes after the inputs in a batch, any other (model, "
                "validation_data)"
            )
        if trial.status == "fail to forward":
            raise UsageError(
                f"{self._data_argument} is incompatible with your model input. {trial.reason}"
            )
        raise UsageError(f"The original model cannot be run ({trial.status}): {trial.reason}")


class _ModelRow(Mapping[str, Any]):
    """One entry of ``optimized_model_dict``."""

    _KEYS = ("status", "latency", "accuracy", "model")

    def __init__(self, optimizer: BaseInferenceOptimizer, trial: Trial):
        self._optimizer = optimizer
        self._trial = trial

    def __getitem__(self, key: str) -> Any:
        if key not in self._KEYS:
            raise KeyError(key)
        if key != "model":
            return getattr(self._trial, key)
        return self._optimizer.get_model(self._trial.method) if self._trial.usable else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._KEYS)

    def __len__(self) -> int:
        return len(self._KEYS)

    def __repr__(self) -> str:
        return repr({key: self[key] for key in self._KEYS if key != "model"})


def check_direction(direction: str) -> None:
    """Refuse a direction of a metric that does not exist."""
    if direction not in ("min", "max"):
        raise UsageError(f"Only support direction 'min', 'max'. {direction!r} was given.")


def check_counts(name: str, values: Any, default: int | None) -> tuple[int | None, ...]:
    """Return positive integers that were given under a name; `default` alone without any."""
    if values is None:
        return (default,)
    if not isinstance(values, (list, tuple, range)) or not values:
        raise UsageError(f"{name} should be a list of positive integers, got {values!r}")
    return tuple(check_positive(name, value) for value in values)


def _write_text(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The table cannot be written to {path}: {error.strerror}") from error
