"""What users see of a search, whatever the framework is."""

from __future__ import annotations

import abc
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.registry import methods
from bigdl.nano.acceleration.search.bench import Bench
from bigdl.nano.acceleration.search.candidates import (
    ACCELERATORS,
    ORIGINAL,
    PRECISIONS,
    check_member,
    fits,
)
from bigdl.nano.acceleration.search.chart import write_chart
from bigdl.nano.acceleration.search.progress import Progress
from bigdl.nano.acceleration.search.results import Results
from bigdl.nano.acceleration.search.table import render
from bigdl.nano.acceleration.search.trial import Plan, Trial
from bigdl.nano.acceleration.search.views import ModelRow
from bigdl.nano.acceleration.search.walk import Limits, search

__all__ = ["Searcher", "count", "counts"]


class Searcher(abc.ABC):
    """Keeps what came of trying methods on a model.

    A framework's class has a method ``optimize``, which makes a bench and calls :meth:`_try_all`
    and then :meth:`_keep`.
    """

    _framework: ClassVar[str]
    _data_argument: ClassVar[str]
    """Name of the argument of ``optimize`` that holds the inputs."""

    _results: Results | None = None
    _bench: Bench
    _models: dict[str, Any]

    def summary(self) -> None:
        """Print the table of methods.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called.
        """
        print(render(self._found("result", "summary")))

    def results(self):
        """All figures of the search.

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
        return self._found("result", "results").to_pandas()

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
        known = methods(self._framework)
        write_chart(self._found("result", "plot"), Path(path), lambda name: known[name].precision)

    @property
    def optimized_model_dict(self) -> Mapping[str, Mapping[str, Any]]:
        """For each method ``"status"``, ``"latency"`` (ms), ``"accuracy"`` and ``"model"``.

        The model is loaded when it is asked for; it is None where a method failed.
        """
        if self._results is None:
            return {}
        return {name: ModelRow(self.get_model, trial) for name, trial in self._results.items()}

    def get_model(self, method_name: str) -> Any:
        """The model that a method made.

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
        results = self._found("model", "get_model")
        known = methods(self._framework)
        if method_name not in known:
            raise UsageError(
                f"There is no method {method_name!r}; choose one of {', '.join(known)}"
            )
        trial = results.get(method_name)
        if trial is None or not trial.usable:
            why = "it was not tried" if trial is None else f"{trial.status}: {trial.reason}"
            raise UsageError(
                "Unable to get the specified model as it doesn't exist in optimized_model_dict. "
                f"Method {method_name!r}: {why}"
            )
        if method_name not in self._models:
            self._models[method_name] = self._loaded(trial)
        return self._models[method_name]

    def _best(
        self,
        accelerator: str | None,
        precision: str | None,
        use_ipex: bool | None,
        accuracy_criterion: float | None,
    ) -> tuple[Any, str]:
        """What ``get_best_model`` returns."""
        results = self._found("model", "get_best_model")
        check_member("accelerator", accelerator, ACCELERATORS)
        check_member("precision", precision, PRECISIONS)
        _check_criterion(results, accuracy_criterion)
        kind = (
            None if accelerator is None else (accelerator,),
            None if precision is None else (precision,),
            use_ipex,
        )
        known = methods(self._framework)
        related = [n for n, t in results.items() if t.usable and fits(known[n], *kind)]
        if not related:
            raise UsageError("Don't find related model in optimize's results.")
        kept = [n for n in related if results.keeps_accuracy(results[n], accuracy_criterion)]
        if not kept:
            warnings.warn(
                "No model of this kind keeps the accuracy of the original within "
                f"{accuracy_criterion:.3g} of its value, so the original is returned",
                stacklevel=3,
            )
        best = results.best(kept) or ORIGINAL
        return self.get_model(best), known[best].option

    def _loaded(self, trial: Trial) -> Any:
        """The model of a trial that works."""
        if trial.method == ORIGINAL:
            return self._original(trial)
        directory = self._results.directory / trial.method
        if trial.saved and directory.exists():
            return self._read(directory)
        method = methods(self._framework)[trial.method]
        return self._bench.build(method, trial.threads).model

    @abc.abstractmethod
    def _original(self, trial: Trial) -> Any:
        """The user's model, as it is returned if nothing is better."""

    @abc.abstractmethod
    def _read(self, directory: Path) -> Any:
        """A model that a trial has saved."""

    def _found(self, what: str, asked: str) -> Results:
        if self._results is None:
            kind = "optimization result" if what == "result" else "optimized model"
            raise UsageError(f"There is no {kind}. You should call .optimize() before {asked}()")
        return self._results

    def _try_all(
        self, results: Results, bench: Bench, plan: Plan, limits: Limits, threads: int, show: bool
    ) -> None:
        """Make the trials of a search and put them into `results`."""
        with Progress(len(bench.methods), show) as progress:
            trials = search(
                bench,
                list(bench.methods),
                plan,
                limits,
                results.directory,
                threads=threads,
                show=show,
                progress=progress,
            )
        self._check_original(trials[0])
        results.add(trials)

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

    def _keep(self, results: Results, bench: Bench, began: float, file: str | None) -> None:
        """Take the results of a search and print its table, also to a file."""
        self._results, self._bench, self._models = results, bench, {}
        self.summary()
        print(f"Optimization cost {time.monotonic() - began:.1f}s in total.")
        if file is not None:
            _write_text(file, render(results))


def count(name: str, value: Any) -> int:
    """A positive number that a user gave under a name.

    Raises
    ------
    UsageError
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be an int of at least 1, not {value!r}")
    return value


def counts(name: str, values: Any, otherwise: int | None) -> tuple[int | None, ...]:
    """Positive numbers that a user gave under a name; `otherwise` alone without any.

    Raises
    ------
    UsageError
    """
    if values is None:
        return (otherwise,)
    if not isinstance(values, (list, tuple, range)) or not values:
        raise UsageError(f"{name} must be a list of ints of at least 1, not {values!r}")
    return tuple(count(name, value) for value in values)


def _check_criterion(results: Results, criterion) -> None:
    if criterion is None:
        return
    if not results.scored:
        raise UsageError(
            "If you want to specify accuracy_criterion, you need to set metric and "
            "validation_data when call 'optimize'."
        )
    if not isinstance(criterion, (int, float)) or isinstance(criterion, bool) or criterion < 0:
        raise UsageError(
            f"accuracy_criterion must be a fraction like 0.05 that is not negative, not "
            f"{criterion!r}"
        )


def _write_text(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The table cannot be written to {path}: {error.strerror}") from error
