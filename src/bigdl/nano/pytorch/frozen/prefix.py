"""Frozen segments of a model, and the function that accelerates them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

import bigdl.nano.pytorch.inference.methods  # noqa: F401 - registers the methods
from bigdl.common.checks import check_choice
from bigdl.common.errors import UsageError, one_line
from bigdl.nano.acceleration import autotune
from bigdl.nano.acceleration.method import BuildOptions, Method, find_method
from bigdl.nano.acceleration.precision import BF16, FP32, INT8, PRECISIONS, Precision
from bigdl.nano.acceleration.structure import first_batches
from bigdl.nano.pytorch.frozen.calls import Chain, find_frozen
from bigdl.nano.pytorch.frozen.features import CachedFeatures
from bigdl.nano.pytorch.frozen.segment import FrozenSegment
from bigdl.nano.pytorch.inference.source import (
    CALIBRATION_DATA,
    TorchSource,
    batches_of,
    split_batch,
)
from bigdl.nano.pytorch.training.steps import state_preserved

# Methods of each precision in the order in which they are tried. The original modules without
# autograd come last.
_METHODS: dict[str | None, tuple[str, ...]] = {
    None: ("openvino_bf16", "openvino_fp32"),  # the fastest of these and the original modules
    FP32: (),
    BF16: ("openvino_bf16", "openvino_fp32"),
    INT8: ("openvino_int8", "onnxruntime_int8_qlinear"),
}


def accelerate_frozen_prefix(
    model: nn.Module,
    sample: object,
    *,
    precision: str | None = None,
    calib_data: object = None,
    sample_size: int = 100,
    metric: Callable[[nn.Module], float] | None = None,
    tolerance: float = 0.01,
    method: str | None = None,
    threads: int | None = None,
) -> FrozenPrefix:
    """Accelerate the frozen layers of a model while its other layers are trained.

    The model keeps its class, modules, parameters and state dict. Frozen modules get another
    ``forward`` if their input needs no gradient and they are deterministic in their current mode.
    Others are not changed, and the report has the reason. If a weight, a mode or ``requires_grad``
    of a replaced module changes later, its original code runs again.

    Parameters
    ----------
    model : Module
        The model in its training modes.
    sample : Tensor, tuple, list or dict
        A small batch of its input, with or without targets.
    precision : {"fp32", "bf16", "int8"}, optional
        ``"fp32"`` runs the original modules without autograd, with bit-identical results. By
        default, OpenVINO in bfloat16 and float32 and the original modules are timed on the sample,
        and the fastest is used.
    calib_data : DataLoader or batches, optional
        Calibration data, required for int8.
    sample_size : int
        Number of rows of `calib_data` to use.
    metric : callable, optional
        Function that returns a score of the model; higher is better. int8 is then used only if the
        relative loss is at most `tolerance`; otherwise bf16.
    tolerance : float
        Largest relative loss of the score.
    method : str, optional
        Name of a registered method, e.g. ``"jit_bf16_ipex"``; by default the best for the
        precision.
    threads : int, optional
        Number of threads; torch's by default.

    Returns
    -------
    FrozenPrefix
        Call ``release`` or leave the ``with`` block to restore the model.

    Raises
    ------
    UsageError
        If an argument is invalid, or the model does not run on the sample.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.frozen import accelerate_frozen_prefix
    >>> backbone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 6))
    >>> model = torch.nn.Sequential(backbone.requires_grad_(False), torch.nn.Linear(6, 2))
    >>> x = torch.ones(3, 4)
    >>> plain = model(x)
    >>> with accelerate_frozen_prefix(model, x, precision="fp32") as prefix:
    ...     torch.equal(model(x), plain)  # train here
    True
    >>> print(prefix.report())
    0: eager, relative error 0
    """
    check_choice("precision", precision, _METHODS)
    precision = PRECISIONS.get(precision or "")
    if precision == INT8 and calib_data is None:
        raise UsageError(
            "int8 needs calibration data; pass calib_data, e.g. the training loader",
            code="argument-missing",
            argument="calib_data",
        )
    if metric is not None and precision != INT8:
        raise UsageError(
            f"metric decides whether int8 is used; precision is {precision!r}",
            code="argument-conflict",
            argument="metric",
        )
    prefix = FrozenPrefix(model, sample, precision, method, calib_data, sample_size, threads)
    prefix.build()
    if metric is not None and prefix.segments:
        prefix.keep_if_accurate(metric, tolerance)
    return prefix


class FrozenPrefix(AbstractContextManager["FrozenPrefix"]):
    """The frozen segments of a model, created by :func:`accelerate_frozen_prefix`.

    Attributes
    ----------
    model : Module
    segments : list of FrozenSegment
        Replaced modules.
    left_alone : list of (str, str)
        Names of frozen modules that were not replaced, with the reason.
    precision : Precision or None
    notes : list of str
        Decisions during the build, as sentences.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.frozen import accelerate_frozen_prefix
    >>> backbone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 6))
    >>> model = torch.nn.Sequential(backbone.requires_grad_(False), torch.nn.Linear(6, 2))
    >>> prefix = accelerate_frozen_prefix(model, torch.ones(3, 4), precision="fp32")
    >>> [segment.method for segment in prefix.segments], prefix.left_alone
    (['eager'], [])
    >>> prefix.release()
    """

    def __init__(
        self,
        model: nn.Module,
        sample: object,
        precision: Precision | None,
        method: str | None,
        calib_data: object,
        sample_size: int,
        threads: int | None,
    ):
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"model should be a torch.nn.Module, but a {type(model).__name__} was given",
                code="model-type",
            )
        self.model, self.precision = model, precision
        self.notes: list[str] = []
        self._method, self._threads = method, threads
        self._calib_data, self._sample_size = calib_data, sample_size
        self._sample = split_batch(model, sample)
        self._find()

    def _find(self) -> None:
        """Find the frozen segments; set `segments` and `left_alone`."""
        args, kwargs, _ = self._sample
        try:
            chains, self.left_alone = find_frozen(self.model, args, kwargs)
        except Exception as error:
            raise UsageError(
                f"{type(self.model).__name__} does not run on the sample ({one_line(error)}); pass "
                "a batch of its input as in training",
                code="model-input",
            ) from error
        self._starts_at_input = bool(chains) and any(
            chains[0].calls[0].input is value for value in (*args, *kwargs.values())
        )
        self.segments = self._segments_without_effect(chains)

    def _segments_without_effect(self, chains: list[Chain]) -> list[FrozenSegment]:
        """Return the segments that do not change the model's result; split chains if necessary."""
        expected = self._result()
        segments: list[FrozenSegment] = []
        for chain in chains:
            apart = [Chain(chain.parent, [call]) for call in chain.calls]
            for candidate in ([FrozenSegment(chain)], [FrozenSegment(each) for each in apart]):
                if self._same(expected, [*segments, *candidate]):
                    segments += candidate
                    break
            else:
                reason = "the model gives another result without it"
                self.left_alone.append((FrozenSegment(chain).name, reason))
        return segments

    def _result(self) -> object:
        with state_preserved(self.model), torch.no_grad():
            torch.manual_seed(0)
            return self.model(*self._sample.args, **self._sample.kwargs)

    def _same(self, expected: object, segments: Sequence[FrozenSegment]) -> bool:
        for segment in segments:
            segment.attach()
        try:
            torch.testing.assert_close(self._result(), expected)
        except AssertionError:
            return False
        finally:
            for segment in segments:
                segment.detach()
        return not any(segment.intermediates_used for segment in segments)

    def build(self) -> None:
        """Build all segments and replace the frozen modules with the segments."""
        self.release()
        inputs = self._calibration() if self.precision == INT8 else {}
        for segment in self.segments:
            self._build(segment, inputs.get(segment))
        self.attach()

    def _build(self, segment: FrozenSegment, rows: list | None) -> None:
        names = (self._method,) if self._method else _METHODS[self.precision]
        runs: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        for name in names:
            chosen: Method = find_method(name)
            options = BuildOptions(thread_num=self._threads or torch.get_num_threads())
            source = TorchSource(segment.module, (segment.sample,), data=rows)
            try:
                chosen.require()
                built = chosen.build(source, options)
            except UsageError as error:
                if self._method:
                    raise
                self.notes.append(f"{segment.name}: {name} is impossible: {one_line(error)}")
                continue

            def run(x: torch.Tensor, built: Any = built) -> torch.Tensor:
                return built(x.contiguous())  # torch copies channels faster than NumPy does

            runs[name] = run
            if self.precision is not None or self._method:
                segment.use(name, run)
                return
        runs["eager"] = segment.eager
        calls = {name: partial(run, segment.sample) for name, run in runs.items()}
        with torch.no_grad():
            name = (
                autotune.choose(autotune.benchmark(calls), "eager").name
                if len(runs) > 1
                else "eager"
            )
        segment.use(name, runs[name])

    def _calibration(self) -> dict[FrozenSegment, list[torch.Tensor]]:
        """Return each segment's inputs for the first rows of the calibration data."""
        seen: dict[FrozenSegment, list[torch.Tensor]] = {segment: [] for segment in self.segments}
        with ExitStack() as hooks, state_preserved(self.model), torch.no_grad():
            for segment, inputs in seen.items():
                hook = segment.modules[0].register_forward_pre_hook(
                    lambda module, args, inputs=inputs: inputs.append(args[0].detach().clone())
                )
                hooks.callback(hook.remove)
            batches = batches_of(self.model, self._calib_data, name=CALIBRATION_DATA)
            for batch in first_batches(batches, self._sample_size):
                self.model(*batch.args, **batch.kwargs)
        return seen

    def keep_if_accurate(self, metric: Callable[[nn.Module], float], tolerance: float) -> None:
        """Switch to bf16 if acceleration lowers the model's metric by more than `tolerance`."""
        self.release()
        plain = float(metric(self.model))
        self.attach()
        fast = float(metric(self.model))
        enough = plain - fast <= tolerance * abs(plain)
        scores = f"metric {plain:.4g} plain, {fast:.4g} in {self.precision}"
        self.notes.append(
            f"{scores}: {'kept' if enough else 'the drop is too large, so bf16 is used'}"
        )
        if not enough:
            self.precision, self._method = BF16, None
            self.build()

    def attach(self) -> None:
        """Replace the frozen modules with the built segments."""
        for segment in self.segments:
            segment.attach()

    def release(self) -> None:
        """Restore the original modules."""
        for segment in self.segments:
            segment.detach()

    def refresh(self) -> None:
        """Find and build all segments again after weights, modes or ``requires_grad`` changed."""
        self.release()
        self.notes.clear()
        self._find()
        self.build()

    def cached(
        self, dataset: Dataset, directory: str | os.PathLike, batch_size: int = 32
    ) -> CachedFeatures:
        """Return a dataset that contains the segment's precomputed outputs instead of images.

        The model accepts these features instead of its input.

        Parameters
        ----------
        dataset : Dataset
            Dataset of pairs of an input of the model and a target, without random transforms.
        directory : path
            Directory of the features. They are reused while weights and data are the same.
        batch_size : int
            Batch size for computing features.

        Returns
        -------
        CachedFeatures

        Raises
        ------
        UsageError
            If samples are random, the model does not start with a frozen segment, or the segment's
            outputs have the shape of its inputs.

        Examples
        --------
        >>> import torch
        >>> from bigdl.nano.pytorch.frozen import accelerate_frozen_prefix
        >>> backbone = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 6))
        >>> model = torch.nn.Sequential(backbone.requires_grad_(False), torch.nn.Linear(6, 2))
        >>> rows = torch.utils.data.TensorDataset(torch.ones(5, 4), torch.arange(5))
        >>> with accelerate_frozen_prefix(model, torch.ones(1, 4), precision="fp32") as prefix:
        ...     features = prefix.cached(rows, "features")
        ...     loader = torch.utils.data.DataLoader(features, batch_size=5)
        ...     [model(x).shape for x, y in loader]  # x are features already
        [torch.Size([5, 2])]
        """
        if not self.segments or not self._starts_at_input:
            raise UsageError(
                "The model does not begin with a frozen segment:\n" + self.report(),
                code="model-unsupported",
            )
        if not self.segments[0].has_distinct_feature_shape():
            raise UsageError(
                "Features can be cached only where their shape differs from an image's, but both "
                f"are {tuple(self.segments[0].sample.shape[1:])}",
                code="model-unsupported",
            )
        dtype = self.segments[0].output.dtype
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UsageError(
                f"Features are stored in float32, which cannot represent {dtype}",
                code="model-unsupported",
            )
        self.segments[0].accepts_cached = True
        return CachedFeatures(self.segments[0], dataset, directory, batch_size)

    def report(self) -> str:
        """Return a report: how each segment runs, and why other frozen modules are not replaced."""
        lines = [
            f"{segment.name}: {segment.method}, relative error {segment.error:.2g}"
            + (f"; the original modules run because {segment.reason}" if segment.reason else "")
            for segment in self.segments
        ]
        lines += [f"{name}: not accelerated, {reason}" for name, reason in self.left_alone]
        lines += self.notes
        return "\n".join(lines or ["The model has no frozen modules."])

    def __exit__(self, *_: object) -> None:
        self.release()

    def __getstate__(self) -> dict:
        raise TypeError("A FrozenPrefix cannot be pickled: its runtimes belong to this process")
