"""The part of InferenceOptimizer that tries many methods and chooses among them."""

from __future__ import annotations

import copy
import importlib.metadata
import platform
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from bigdl.common.cpu import isa_flags, usable_cores
from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.method import Method
from bigdl.nano.acceleration.registry import methods
from bigdl.nano.acceleration.search.cache import Cache
from bigdl.nano.acceleration.search.candidates import choose
from bigdl.nano.acceleration.search.fingerprint import fingerprint
from bigdl.nano.acceleration.search.results import Results
from bigdl.nano.acceleration.search.searcher import Searcher, count, counts
from bigdl.nano.acceleration.search.trial import OBJECTIVES, Plan, Trial
from bigdl.nano.acceleration.search.views import MethodsOfBigDL2
from bigdl.nano.acceleration.search.walk import Limits
from bigdl.nano.pytorch.inference.accelerated import AcceleratedModel
from bigdl.nano.pytorch.inference.bench import TorchBench
from bigdl.nano.pytorch.inference.context import Settings, remember_settings
from bigdl.nano.pytorch.inference.storage import load_model
from bigdl.nano.pytorch.inference.views import NAMES_OF_BIGDL_2

__all__ = ["Search"]

_PACKAGES = ("torch", "openvino", "nncf", "onnx", "onnxruntime", "torchao", "bigdl")


class Search(Searcher):
    """Tries methods on a model and keeps what came of them.

    Attributes
    ----------
    ALL_INFERENCE_ACCELERATION_METHOD : mapping of str to Method
        The 27 methods of ``search_mode="all"``.
    DEFAULT_INFERENCE_ACCELERATION_METHOD : mapping of str to Method
        The 11 methods that are tried unasked.
    """

    ALL_INFERENCE_ACCELERATION_METHOD: Mapping[str, Method] = MethodsOfBigDL2(
        "torch", NAMES_OF_BIGDL_2, default=False
    )
    DEFAULT_INFERENCE_ACCELERATION_METHOD: Mapping[str, Method] = MethodsOfBigDL2(
        "torch", NAMES_OF_BIGDL_2, default=True
    )

    _framework = "torch"
    _data_argument = "training_data"
    _bench: TorchBench

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
            runs=count("latency_sample_num", latency_sample_num),
            objective=objective,
            threads=counts("thread_counts", thread_counts, thread_num),
            batch_sizes=counts("batch_sizes", batch_sizes, None),
        )
        bench = TorchBench(
            model,
            {name: methods("torch")[name] for name in names},
            training_data,
            input_sample=input_sample,
            validation_data=validation_data,
            metric=metric,
            thread_num=None if thread_num is None else count("thread_num", thread_num),
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
            threads = torch.get_num_threads()
            self._try_all(results, bench, plan, limits, threads, show=logging)
            store.put(key, results)
        else:
            print("An equal search was made before; pass cache=False to make it again.")
        self._keep(results, bench, begin, output_filename)

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
        return self._best(accelerator, precision, use_ipex, accuracy_criterion)

    def _original(self, trial: Trial) -> torch.nn.Module:
        original = _evaluating(self._bench.model)
        remember_settings(original, Settings(threads=trial.threads))
        return original

    def _read(self, directory: Path) -> torch.nn.Module:
        return load_model(directory, self._bench.model)


def _check_model(model) -> None:
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model should be a nn module. A {type(model).__name__} was given.")
    if isinstance(model, AcceleratedModel):
        raise UsageError(
            "Expect a nn.Module instance that is not traced or quantized but got type "
            f"{type(model)}; pass the original model"
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


def _evaluating(model: torch.nn.Module) -> torch.nn.Module:
    """The model if it is in eval mode, else a twin that is, with the same parameters."""
    if not any(module.training for module in model.modules()):
        return model
    shared = {id(each): each for each in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared).eval()
