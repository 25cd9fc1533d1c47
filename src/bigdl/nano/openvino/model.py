"""``OpenVINOModel``: a network of OpenVINO that is called like a function of arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.nano.openvino.compiled import CompiledNetwork
from bigdl.nano.openvino.facade import OpenVINOFacade
from bigdl.nano.openvino.network import as_array

__all__ = ["OpenVINOModel"]


class OpenVINOModel(OpenVINOFacade):
    """A network in OpenVINO's format, called with arrays by position or by name.

    One object may be called by several threads at the same time.

    Parameters
    ----------
    ie_network : str, Path, or openvino.Model
        An ``.xml`` file with its ``.bin`` beside it, an ``.onnx`` file, a directory that
        :meth:`save` made, or a network in memory.
    device : str
        ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"NPU"`` (or its old name ``"VPUX"``), ``"AUTO"``, ….
    precision : str
        What the network computes in: ``"fp32"``, ``"bf16"``, ``"fp16"``, or ``"int8"`` for one
        that was quantized. Quantizing is done by :meth:`pot`.
    thread_num : int, optional
        Threads of one inference on a CPU; by default one for each physical core in the affinity
        mask.
    config : mapping, optional
        Properties of OpenVINO; they go before what the other parameters mean.
    shapes : str, mapping or sequence, optional
        Shapes to give the inputs first, as in :meth:`reshape`.
    cache_dir : str or Path, optional
        Directory in which OpenVINO keeps compiled networks, so that the next start is faster.

    Raises
    ------
    UsageError
        If the network cannot be read, reshaped or compiled, or the device or a type of numbers is
        not there.

    Examples
    --------
    >>> model = OpenVINOModel("model.xml", thread_num=2)  # doctest: +SKIP
    >>> logits = model(images)  # doctest: +SKIP
    >>> many = model.async_predict([images, images], num_requests=2)  # doctest: +SKIP
    """

    def __init__(
        self,
        ie_network: Any,
        device: str = "CPU",
        precision: str = "fp32",
        thread_num: int | None = None,
        config: Mapping[str, Any] | None = None,
        shapes: Any = None,
        *,
        cache_dir: Any = None,
    ):
        self.ov_network = CompiledNetwork(
            ie_network,
            device,
            precision=precision,
            thread_num=thread_num,
            config=config,
            shapes=shapes,
            cache_dir=cache_dir,
        )

    def __call__(self, *inputs: Any, **named: Any) -> np.ndarray | list[np.ndarray]:
        """Run the network.

        Parameters
        ----------
        *inputs : array_like or torch.Tensor
            The first inputs in the network's order.
        **named : array_like or torch.Tensor
            The others by their names.

        Returns
        -------
        ndarray or list of ndarray
            The output; a list if there are several.

        Raises
        ------
        UsageError
            If inputs are missing, are given twice, or do not fit.
        """
        return self.nano_result_of(self.nano_infer(self._ordered(inputs, named)))

    forward = __call__

    def nano_arrays_of(self, call: Any) -> list[np.ndarray]:
        return self._ordered(*_call(call))

    def nano_result_of(self, results: list[np.ndarray]) -> np.ndarray | list[np.ndarray]:
        return results[0] if len(results) == 1 else results

    def save(self, path: Any) -> None:
        """Write the network.

        Parameters
        ----------
        path : str or Path
            An ``.xml`` file, or a directory, which is created, for ``ov_saved_model.xml`` and
            ``.bin``.
        """
        self.ov_network.save(path)

    def pot(
        self,
        dataloader: Iterable[Any],
        metric: Callable[[Any, Any], float] | None = None,
        higher_better: bool = True,
        drop_type: str = "relative",
        maximal_drop: float = 0.999,
        max_iter_num: int = 1,
        sample_size: int = 300,
        **options: Any,
    ) -> OpenVINOModel:
        """Quantize to 8-bit integers after training.

        Parameters
        ----------
        dataloader : iterable
            Batches for calibration: inputs, or pairs (inputs, target), or (input, …, target).
            Elements beyond the network's inputs are the target.
        metric : callable or torchmetrics.Metric, optional
            ``metric(predictions, targets) -> float``. With it, layers go back to floating point
            until the figure on `dataloader` is good enough.
        higher_better : bool
            Whether a higher figure is better.
        drop_type : str
            Whether `maximal_drop` is ``"relative"`` to the figure of this model or ``"absolute"``.
        maximal_drop : float
            By how much the figure may get worse.
        max_iter_num : int
            Rounds of taking layers back.
        sample_size : int
            Samples to calibrate with.
        **options
            Further arguments of :func:`bigdl.nano.openvino.quantization.quantized_network`.

        Returns
        -------
        OpenVINOModel
            The quantized model, on the same device with the same threads. This one stays as it
            is.

        Raises
        ------
        UsageError
            If `dataloader` is empty or does not fit the network, or an argument makes no sense.
        """
        from bigdl.nano.openvino.quantization import quantized_network

        network = quantized_network(
            self.ie_network,
            dataloader,
            metric=metric,
            higher_better=higher_better,
            drop_type=drop_type,
            maximal_drop=maximal_drop,
            max_iterations=max_iter_num,
            sample_size=sample_size,
            **options,
        )
        own = self.ov_network
        return OpenVINOModel(
            network, own.device, "int8", own.thread_num, _without_bf16(own.additional_config)
        )

    @property
    def ie_network(self):
        """The ``openvino.Model``; a network or path that is set is compiled with the same
        properties."""
        return self.ov_network.network

    @ie_network.setter
    def ie_network(self, network: Any) -> None:
        self.ov_network.network = network

    @property
    def forward_args(self) -> list[str]:
        """Names of the inputs in order."""
        return self.ov_network.input_names

    @property
    def device(self) -> str:
        """The device as OpenVINO spells it."""
        return self.ov_network.device

    @property
    def thread_num(self) -> int | None:
        """Threads of one inference as they were asked for."""
        return self.ov_network.thread_num

    def _ordered(self, inputs: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """One array for each input of the network."""
        if not named:
            return [as_array(each) for each in inputs]
        names = self.forward_args
        for name in named:
            if name not in names:
                raise UsageError(f"The network has no input {name!r}; it has {', '.join(names)}")
            if name in names[: len(inputs)]:
                raise UsageError(
                    f"You shouldn't pass arguement {name} as it has been passed as a positional "
                    "arguement."
                )
        rest = names[len(inputs) :]
        missing = [name for name in rest if name not in named]
        if missing:
            raise UsageError(f"The network also needs the input {', '.join(missing)}")
        return [as_array(each) for each in [*inputs, *(named[name] for name in rest)]]


def _call(given: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Positional and named inputs of one call."""
    if isinstance(given, Mapping):
        return (), given
    return (given if isinstance(given, tuple | list) else (given,)), {}


def _without_bf16(config: dict[str, Any]) -> dict[str, Any]:
    hint = "INFERENCE_PRECISION_HINT"
    return {name: value for name, value in config.items() if name != hint}
