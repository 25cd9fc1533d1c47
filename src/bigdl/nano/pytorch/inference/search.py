"""The part of InferenceOptimizer that tries many methods and chooses among them."""

from __future__ import annotations

import copy
import importlib.metadata
import platform
import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bigdl.common.cpu import isa_flags, usable_cores
from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.method import Method
from bigdl.nano.acceleration.registry import methods
from bigdl.nano.acceleration.search.cache import Cache
from bigdl.nano.acceleration.search.candidates import (
    ACCELERATORS,
    ORIGINAL,
    PRECISIONS,
    check_member,
    choose,
    fits,
)
from bigdl.nano.acceleration.search.chart import write_chart
from bigdl.nano.acceleration.search.fingerprint import fingerprint
from bigdl.nano.acceleration.search.progress import Progress
from bigdl.nano.acceleration.search.results import Results
from bigdl.nano.acceleration.search.table import render
from bigdl.nano.acceleration.search.trial import OBJECTIVES, Plan, Trial
from bigdl.nano.acceleration.search.walk import Limits, search
from bigdl.nano.pytorch.inference.accelerated import AcceleratedModel
from bigdl.nano.pytorch.inference.bench import TorchBench
from bigdl.nano.pytorch.inference.context import Settings, remember_settings
from bigdl.nano.pytorch.inference.storage import load_model
from bigdl.nano.pytorch.inference.views import NAMES_OF_BIGDL_2, MethodsOfBigDL2, ModelRow

__all__ = ["Search"]

_PACKAGES = ("torch", "openvino", "nncf", "onnx", "onnxruntime", "torchao", "bigdl")


class Search:
    """Tries methods on a model and keeps what came of them.

    Attributes
    ----------
    ALL_INFERENCE_ACCELERATION_METHOD : mapping of str to Method
        The 27 methods of ``search_mode="all"``.
    DEFAULT_INFERENCE_ACCELERATION_METHOD : mapping of str to Method
        The 11 methods that are tried unasked.
    """

    ALL_INFERENCE_ACCELERATION_METHOD: Mapping[str, Method] = MethodsOfBigDL2(default=False)
    DEFAULT_INFERENCE_ACCELERATION_METHOD: Mapping[str, Method] = MethodsOfBigDL2(default=True)

    _results: Results | None = None
    _bench: TorchBench
    _models: dict[str, torch.nn.Module]

    def optimize(
        self,
        model: torch.nn.Module,
        training_data: Any = None,
        validation_data: Any = None,
        input_sample: Any = None,
        metric: Any = None,
        direction: str = "max",
        thread_num: int | None = None,
        accelerator: tuple | None = None,
        precision: tuple | None = None,
        use_ipex: bool | None = None,
        jit_strict: bool = True,
        enable_onednn: bool = False,
        search_mode: str = "default",
        dynamic_axes: bool | Mapping = True,
        logging: bool = False,
        output_tensors: bool = True,
        latency_sample_num: int = 100,
        includes: Collection[str] | None = None,
        excludes: Collection[str] | None = None,
        output_filename: str | None = None,
        no_cache: bool = False,
        *,
        objective: str = "latency",
        batch_sizes: Sequence[int] | None = None,
        thread_counts: Sequence[int] | None = None,
        time_limit: float | None = None,
        memory_limit: int | None = None,
        cache: bool = True,
        cache_dir: str | None = None,
    ) -> None:
        """Try methods on a model: convert it, compare its results, time it, score it.

        Each method is tried in a process of its own, so that one that hangs, crashes or takes too
        much memory costs its row only. It is timed in alternation with the original. The table is
        printed at the end; :meth:`summary`, :meth:`results` and :meth:`plot` give it again.

        Parameters
        ----------
        model : Module
            Not changed.
        training_data : DataLoader, Tensor, tuple or dict
            Batches for int8's calibration, of which the first is the sample: a loader, or one
            batch. A batch is ``x``, ``(x,)``, ``(x, y)`` (``x`` may be a tuple of inputs),
            ``(x1, …, xk, y…)`` for a model of k inputs, or a dict of arguments.
        validation_data : DataLoader, Tensor, tuple or dict, optional
            Batches with targets, for `metric`.
        input_sample : Tensor, tuple or dict, optional
            The sample, instead of the first batch of `training_data`.
        metric : torchmetrics.Metric or callable, optional
            A Metric, or a callable with parameters for predictions and targets (names that contain
            "pred" and "target"), whose results are averaged over the samples; or any other
            callable, called as ``metric(model, validation_data)``, or as ``metric(model)``
            without validation data.
        direction : {"max", "min"}
            Whether a higher or a lower metric is better.
        thread_num : int, optional
            Threads of every model.
        accelerator : tuple, optional
            Only methods of these runtimes: None (PyTorch itself), ``"jit"``, ``"onnxruntime"``,
            ``"openvino"``.
        precision : tuple, optional
            Only methods of these precisions: ``"fp32"``, ``"bf16"``, ``"fp16"``, ``"int8"``.
        use_ipex : bool, optional
            Only methods with, or without, what Intel's extension of PyTorch did.
        jit_strict : bool
            Passed to ``torch.jit.trace``.
        enable_onednn : bool
            Accepted; it changes nothing.
        search_mode : {"default", "all", "grid", "extended"}
            ``"default"`` tries 11 methods, ``"all"`` 27, ``"extended"`` these and the ones that
            BigDL 2.x did not have. ``"grid"`` is ``"all"`` filtered by `accelerator`, `precision`
            and `use_ipex`, and is meant wherever one of the three is given.
        dynamic_axes : bool or dict
            As of :meth:`trace`.
        logging : bool
            Show what methods print, and a progress bar also where there is no terminal.
        output_tensors : bool
            Tensors, or ndarrays.
        latency_sample_num : int
            Calls that are timed; fewer where they take more than ten seconds.
        includes : list of str, optional
            Try these methods only, and the original.
        excludes : list of str, optional
            Leave these methods out; the original is always tried.
        output_filename : str, optional
            File for the table.
        no_cache : bool
            Time successive batches of `training_data` instead of the sample again and again.
        objective : {"latency", "throughput", "memory"}
            What the best model is best in: milliseconds of a call, samples per second at the best
            of `batch_sizes`, or memory of a process that loads and runs it.
        batch_sizes : list of int, optional
            Sizes to which the sample is brought for timing; the table shows the latency at the
            first. By default the sample's own.
        thread_counts : list of int, optional
            Thread counts of which the best is found for each method, instead of `thread_num`.
        time_limit : float, optional
            Seconds for one method. By default 20 times what the original took, and at least 300;
            the original is not limited.
        memory_limit : int, optional
            Bytes of resident memory of the process that tries methods; by default 90 % of what is
            free at the beginning.
        cache : bool
            Whether the results of an equal search (model, data, metric, options, versions) are
            taken if there are any. They are kept for the life of this process, or in `cache_dir`.
        cache_dir : str, optional
            Directory in which results and models are kept for other processes.

        Raises
        ------
        UsageError
            If an argument makes no sense, or the original does not run on the data or the metric.

        Warns
        -----
        UserWarning
            If model, data or metric cannot go to another process, so that methods are tried in
            this one.
        """
        begin = time.monotonic()
        _check_model(model)
        if direction not in ("min", "max"):
            raise UsageError(f"Only support direction 'min', 'max'. {direction!r} was given.")
        if objective not in OBJECTIVES:
            raise UsageError(f"objective must be one of {OBJECTIVES}, not {objective!r}")
        names = choose(
            methods("torch"),
            NAMES_OF_BIGDL_2,
            search_mode=search_mode,
            accelerator=accelerator,
            precision=precision,
            use_ipex=use_ipex,
            includes=includes,
            excludes=excludes,
        )
        plan = Plan(
            runs=_count("latency_sample_num", latency_sample_num),
            objective=objective,
            threads=_counts("thread_counts", thread_counts, thread_num),
            batch_sizes=_counts("batch_sizes", batch_sizes, None),
        )
        bench = TorchBench(
            model,
            {name: methods("torch")[name] for name in names},
            training_data,
            input_sample=input_sample,
            validation_data=validation_data,
            metric=metric,
            thread_num=None if thread_num is None else _count("thread_num", thread_num),
            many_batches=no_cache,
            jit_strict=jit_strict,
            dynamic_axes=dynamic_axes,
            output_tensors=output_tensors,
        )
        limits = Limits(time_limit, memory_limit)
        store = Cache(cache_dir)
        wanted = cache or cache_dir is not None
        key = _key(bench, plan, direction, training_data) if wanted else None
        results = store.find(key) if cache else None
        if results is None:
            results = Results([], store.new_directory(), direction, objective)
            _fill(results, bench, plan, limits, logging)
            store.put(key, results)
        else:
            print("An equal search was made before; pass cache=False to make it again.")
        self._results, self._bench, self._models = results, bench, {}
        self.summary()
        print(f"Optimization cost {time.monotonic() - begin:.1f}s in total.")
        if output_filename is not None:
            _write_text(output_filename, render(results))

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
        known = methods("torch")
        write_chart(self._found("result", "plot"), Path(path), lambda name: known[name].precision)

    @property
    def optimized_model_dict(self) -> Mapping[str, Mapping[str, Any]]:
        """For each method ``"status"``, ``"latency"`` (ms), ``"accuracy"`` and ``"model"``.

        The model is loaded when it is asked for; it is None where a method failed.
        """
        if self._results is None:
            return {}
        return {name: ModelRow(self.get_model, trial) for name, trial in self._results.items()}

    def get_model(self, method_name: str) -> torch.nn.Module:
        """The model that a method made.

        Parameters
        ----------
        method_name : str

        Returns
        -------
        Module
            In evaluation mode; for ``"original"`` the user's own.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called, or there is no such method, or it was not tried or
            failed.
        """
        results = self._found("model", "get_model")
        if method_name not in methods("torch"):
            raise UsageError(
                f"There is no method {method_name!r}; choose one of {', '.join(methods('torch'))}"
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

    def get_best_model(
        self,
        accelerator: str | None = None,
        precision: str | None = None,
        use_ipex: bool | None = None,
        accuracy_criterion: float | None = None,
    ) -> tuple[torch.nn.Module, str]:
        """The best model by the objective of :meth:`optimize`.

        Parameters
        ----------
        accelerator, precision : str, optional
            Only methods of this runtime, of this precision.
        use_ipex : bool, optional
            Only methods with, or without, what Intel's extension of PyTorch did.
        accuracy_criterion : float, optional
            Largest drop of the accuracy, as a fraction of the original's: 0.05 is 5 %. Without
            it, the accuracy does not matter.

        Returns
        -------
        model : Module
            In evaluation mode. The original, if nothing is better; if methods were restricted,
            the best of those, and the original if none of them keeps its accuracy (with a
            warning).
        option : str
            What it uses, e.g. ``"openvino + int8"``.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called, no method that was tried and works is of this
            kind, or there is a criterion and no accuracy.
        """
        results = self._found("model", "get_best_model")
        check_member("accelerator", accelerator, ACCELERATORS)
        check_member("precision", precision, PRECISIONS)
        _check_criterion(results, accuracy_criterion)
        kind = (
            None if accelerator is None else (accelerator,),
            None if precision is None else (precision,),
            use_ipex,
        )
        known = methods("torch")
        related = [n for n, t in results.items() if t.usable and fits(known[n], *kind)]
        if not related:
            raise UsageError("Don't find related model in optimize's results.")
        kept = [n for n in related if results.keeps_accuracy(results[n], accuracy_criterion)]
        if not kept:
            warnings.warn(
                "No model of this kind keeps the accuracy of the original within "
                f"{accuracy_criterion:.3g} of its value, so the original is returned",
                stacklevel=2,
            )
        best = results.best(kept) or ORIGINAL
        return self.get_model(best), known[best].option

    def _found(self, what: str, asked: str) -> Results:
        if self._results is None:
            kind = "optimization result" if what == "result" else "optimized model"
            raise UsageError(f"There is no {kind}. You should call .optimize() before {asked}()")
        return self._results

    def _loaded(self, trial: Trial) -> torch.nn.Module:
        model = self._bench.model
        if trial.method == ORIGINAL:
            original = _evaluating(model)
            remember_settings(original, Settings(threads=trial.threads))
            return original
        directory = self._results.directory / trial.method
        if trial.saved and directory.exists():
            return load_model(directory, model)
        return self._bench.build(methods("torch")[trial.method], trial.threads).model


def _fill(results: Results, bench: TorchBench, plan: Plan, limits: Limits, logging: bool) -> None:
    with Progress(len(bench.methods), logging) as progress:
        trials = search(
            bench,
            list(bench.methods),
            plan,
            limits,
            results.directory,
            threads=torch.get_num_threads(),
            show=logging,
            progress=progress,
        )
    _check_original(trials[0])
    results.add(trials)


def _check_original(trial: Trial) -> None:
    if trial.usable:
        return
    if trial.stage == "score":
        raise UsageError(
            "Your metric is incompatible with validation_data, or with the model: "
            f"{trial.reason}; a metric of the parameters pred and target takes the model's result "
            "and what comes after the inputs in a batch, any other (model, validation_data)"
        )
    if trial.status == "fail to forward":
        raise UsageError(f"training_data is incompatible with your model input. {trial.reason}")
    raise UsageError(f"The original model cannot be run ({trial.status}): {trial.reason}")


def _check_model(model) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model should be a nn module. A {type(model).__name__} was given.")
    if isinstance(model, AcceleratedModel):
        raise UsageError(
            "Expect a nn.Module instance that is not traced or quantized but got type "
            f"{type(model)}; pass the original model"
        )


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


def _key(bench: TorchBench, plan: Plan, direction: str, training_data: Any) -> str | None:
    """Digest of all that the results depend on."""
    surroundings = (platform.processor(), sorted(isa_flags()), usable_cores())
    versions = [(package, _version(package)) for package in _PACKAGES]
    data = training_data
    if isinstance(data, torch.utils.data.DataLoader):  # without its state
        data = (data.dataset, data.batch_size, type(data.sampler), data.collate_fn)
    with bench.session():  # whether the model is in training mode does not matter
        return fingerprint(bench.identity(), plan, direction, data, surroundings, versions)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _count(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UsageError(f"{name} must be an int of at least 1, not {value!r}")
    return value


def _counts(name: str, values: Any, otherwise: int | None) -> tuple[int | None, ...]:
    if values is None:
        return (otherwise,)
    if not isinstance(values, (list, tuple, range)) or not values:
        raise UsageError(f"{name} must be a list of ints of at least 1, not {values!r}")
    return tuple(_count(name, value) for value in values)


def _write_text(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The table cannot be written to {path}: {error.strerror}") from error


def _evaluating(model: torch.nn.Module) -> torch.nn.Module:
    """The model if it is in eval mode, else a twin that is, with the same parameters."""
    if not any(module.training for module in model.modules()):
        return model
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared).eval()
