"""Networks of OpenVINO in 8-bit integers, by NNCF's post-training quantization."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError, require
from bigdl.nano.acceleration.quiet import quiet
from bigdl.nano.openvino.network import as_array, port_name
from bigdl.nano.openvino.signal_stack import kept_signal_stack

__all__ = ["RECURRENT", "quantized_network"]

RECURRENT = ("GRUSequence", "LSTMSequence", "RNNSequence", "GRUCell", "LSTMCell", "RNNCell")
"""Operators that stay in floating point: OpenVINO 2026.4 loses the last state of quantized ones."""


def quantized_network(
    network,
    data: Iterable[Any],
    *,
    metric: Callable[[Any, Any], float] | None = None,
    validation: Iterable[Any] | None = None,
    higher_better: bool = True,
    drop_type: str = "relative",
    maximal_drop: float = 0.01,
    max_iterations: int | None = None,
    sample_size: int = 300,
    **options: Any,
):
    """Quantize a network with the activations that it has on samples of data.

    Parameters
    ----------
    network : openvino.Model
        The network; it stays as it is.
    data : iterable
        Batches: an array, a mapping of names to arrays, or a tuple or list whose first elements
        are the inputs (they may be a tuple themselves). What follows the inputs is the target.
        It is iterated more than once unless it is an iterator.
    metric : callable or torchmetrics.Metric, optional
        ``metric(predictions, targets) -> float`` on arrays of all batches, joined; an object with
        ``update``, ``compute`` and ``reset`` gets each batch as tensors. With it, layers are
        taken back to floating point until the figure is good enough
        (``nncf.quantize_with_accuracy_control``).
    validation : iterable, optional
        Batches with targets for `metric`, by default those of `data`.
    higher_better : bool
        Whether a higher figure is better.
    drop_type : str
        Whether `maximal_drop` is ``"relative"`` to the figure of `network` or ``"absolute"``.
    maximal_drop : float
        By how much the figure may get worse.
    max_iterations : int, optional
        Rounds of taking layers back; by default as many as needed.
    sample_size : int
        Samples to calibrate with. Batches are counted by the first dimension of the first input.
    **options
        Further arguments of ``nncf.quantize``, e.g. ``preset`` or ``ignored_scope`` (by default
        recurrent layers).

    Returns
    -------
    openvino.Model

    Raises
    ------
    UsageError
        If there are no samples, a batch does not fit the network, targets are missing, or an
        argument makes no sense.
    """
    nncf = require("nncf", "nano")
    if drop_type not in ("relative", "absolute"):
        raise UsageError(f"drop_type must be 'relative' or 'absolute', not {drop_type!r}")
    if not isinstance(sample_size, int) or sample_size < 1:
        raise UsageError(f"sample_size must be an int of at least 1, but it is {sample_size!r}")
    names = [port_name(port) for port in network.inputs]
    if iter(data) is data:  # an iterator can be gone through once only
        data = list(data)
    batches = _Calibration(data, names, sample_size)
    calibration = nncf.Dataset(batches)
    subset_size = len(batches)
    options.setdefault("ignored_scope", nncf.IgnoredScope(types=list(RECURRENT), validate=False))
    if metric is None:
        with quiet(), kept_signal_stack():
            return nncf.quantize(network, calibration, subset_size=subset_size, **options)
    restoring = nncf.AdvancedAccuracyRestorerParameters(max_num_iterations=max_iterations or 2**31)
    with kept_signal_stack():  # not quietly: it calls the user's metric
        return nncf.quantize_with_accuracy_control(
            network,
            calibration,
            nncf.Dataset(data if validation is None else validation),
            _Judge(metric, names, higher_better),
            subset_size=subset_size,
            max_drop=maximal_drop,
            drop_type=nncf.DropType.RELATIVE if drop_type == "relative" else nncf.DropType.ABSOLUTE,
            advanced_accuracy_restorer_parameters=restoring,
            **options,
        )


class _Calibration:
    """The first batches of data, as mappings of input names to arrays.

    It is iterated several times; its length is the number of batches.
    """

    def __init__(self, data: Iterable[Any], names: list[str], sample_size: int):
        self._data = data
        self._names = names
        self._count = 0
        samples = 0
        for batch in data:
            inputs, _ = _parted(batch, names)
            self._count += 1
            first = inputs[names[0]]
            samples += first.shape[0] if first.ndim else 1
            if samples >= sample_size:
                break
        if not self._count:
            raise UsageError("Quantizing needs samples to calibrate with, but the data is empty")

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (_parted(batch, self._names)[0] for batch in islice(self._data, self._count))


class _Judge:
    """The figure of a compiled network on data, as NNCF wants it: higher is better.

    NNCF measures a relative drop by the ratio of the figures, so that a metric of which less is
    better only has to be negated, but it cannot divide by a figure of 0.
    """

    def __init__(self, metric: Any, names: list[str], higher_better: bool):
        self._metric = metric
        self._names = names
        self._sign = 1 if higher_better else -1

    def __call__(self, compiled, batches: Iterable[Any]) -> tuple[float, None]:
        figure = self._figure(compiled, batches)
        return self._sign * (figure or float(np.finfo(np.float32).tiny)), None

    def _figure(self, compiled, batches: Iterable[Any]) -> float:
        pairs = self._pairs(compiled, batches)
        if hasattr(self._metric, "update") and hasattr(self._metric, "compute"):
            return self._merged(pairs)
        predictions, targets = zip(*pairs, strict=True)
        return float(self._metric(np.concatenate(predictions), np.concatenate(targets)))

    def _merged(self, pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> float:
        torch = require("torch", "nano")
        self._metric.reset()
        for prediction, target in pairs:
            self._metric.update(torch.from_numpy(prediction), torch.from_numpy(target))
        return float(self._metric.compute())

    def _pairs(self, compiled, batches: Iterable[Any]):
        for batch in batches:
            inputs, target = _parted(batch, self._names)
            if target is None:
                raise UsageError("A metric compares with targets, but a batch has inputs only")
            yield np.array(compiled(inputs)[0]), target


def _parted(batch: Any, names: list[str]) -> tuple[dict[str, np.ndarray], np.ndarray | None]:
    """Inputs by name, and the target if there is one."""
    inputs, rest = _inputs_and_rest(batch, len(names))
    if isinstance(inputs, Mapping):
        missing = [name for name in names if name not in inputs]
        if missing:
            raise UsageError(f"A batch lacks the input {', '.join(missing)} of the network")
        arrays = {name: _array(inputs[name]) for name in names}
    elif len(inputs) == len(names):
        arrays = dict(zip(names, map(_array, inputs), strict=True))
    else:
        raise UsageError(
            f"The network has {len(names)} inputs ({', '.join(names)}), but a batch has "
            f"{len(inputs)}"
        )
    return arrays, _array(rest[0]) if rest else None


def _inputs_and_rest(batch: Any, count: int) -> tuple[Any, Sequence[Any]]:
    if not isinstance(batch, tuple | list):
        return (batch if isinstance(batch, Mapping) else (batch,)), ()
    if batch and isinstance(batch[0], tuple | list | Mapping):
        return batch[0], batch[1:]
    return batch[:count], batch[count:]


def _array(value: Any) -> np.ndarray:
    return np.asarray(as_array(value))
