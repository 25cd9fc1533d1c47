"""ServedModel: one model with batching across the threads and servers that call it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from bigdl.nano.openvino.split import SplitError, SplitNetwork
from bigdl.nano.serving.batching import BatchingOptions, BatchReport, MicroBatcher
from bigdl.nano.serving.runners import make_runner
from bigdl.nano.serving.signature import Signature

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

    from bigdl.nano.serving.text_models import ServedText

__all__ = ["ServedModel"]


class ServedModel:
    """A model in this process that joins the rows of concurrent callers into batches.

    Any number of threads may call it. It takes a model of ``bigdl.friesian.models``, a PyTorch
    module, a Keras model, a model accelerated by ``InferenceOptimizer``, a directory that
    ``InferenceOptimizer.save`` wrote, an ONNX, OpenVINO or Keras file, or trees of XGBoost
    (``.ubj``, ``.json``) or LightGBM (``.txt``).

    Loading checks whether rows depend on each other, as with a normalisation over the batch. The
    requests of such a model are computed one by one.

    Parameters
    ----------
    model
        A path, or a model in memory.
    sample : optional
        Sample input; required for a PyTorch module.
    method : str, optional
        Acceleration method of a model in memory, one of :func:`bigdl.nano.acceleration.methods`
        such as ``"openvino_bf16"``, ``"openvino_int8"`` or ``"onnxruntime_int8_qlinear"``. Default
        ``"openvino_fp32"``; ``"original"`` runs the model in its framework. For a file with trees
        ``"auto"``: XGBoost or ONNX Runtime, whichever is faster, with equal results but for
        rounding.
    batching : BatchingOptions, optional
    input_names : sequence of str, optional
        Names of the inputs in order. Default: the model's names, or the ``feature_cols`` of a
        model of ``bigdl.friesian.models``.
    inputs : str, optional
        Types and shapes of the inputs, as ``"x: FP32[-1,4]"``, for a PyTorch graph file that does
        not contain them.
    thread_num : int, optional
        Threads of one call.
    device : str, optional
        OpenVINO device.
    trust : bool
        Run code that the path contains (a PyTorch graph, a Keras Lambda layer) although no program
        of this user has signed it.
    **arguments
        Arguments of ``InferenceOptimizer.build``, e.g. ``calib_data`` for int8 of a PyTorch module
        (``x`` for a Keras model).

    Raises
    ------
    UsageError
        If the model cannot be read, accelerated or run.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.nano.serving import ServedModel
    >>> with ServedModel(torch.nn.ReLU(), sample=torch.zeros(1, 2)) as model:
    ...     print(model.signature.inputs[0])
    ...     model.predict({"input": np.array([[-1, 2], [3, -4]], "float32")})
    input: FP32[-1, 2]
    array([[0., 2.],
           [3., 0.]], dtype=float32)
    """

    def __init__(
        self,
        model: object,
        *,
        sample: object = None,
        method: str | None = None,
        batching: BatchingOptions | None = None,
        input_names: Sequence[str] | None = None,
        inputs: str | None = None,
        thread_num: int | None = None,
        device: str | None = None,
        trust: bool = False,
        **arguments: Any,
    ):
        self._runner = make_runner(
            model,
            sample=sample,
            method=method,
            input_names=input_names,
            inputs=inputs,
            thread_num=thread_num,
            device=device,
            trust=trust,
            **arguments,
        )
        self.batching = batching or BatchingOptions()
        self._observers: list[Callable[[BatchReport], None]] = []
        self._lock = threading.Lock()
        self._batcher = MicroBatcher(
            self._runner.run, self.batching, joins=self._runner.joins, observe=self.report
        )

    @property
    def signature(self) -> Signature:
        """Names, types and shapes of the model's inputs and outputs."""
        return self._runner.signature

    @property
    def platform(self) -> str:
        """The runtime: ``"openvino"``, ``"onnxruntime"``, ``"pytorch"``, ``"tensorflow"``, ….

        Trees run in ``"xgboost"`` or ``"lightgbm"``.
        """
        return self._runner.platform

    @property
    def method(self) -> str:
        """Acceleration method, such as ``"openvino_int8"``; empty if unknown."""
        return self._runner.method

    @property
    def text(self) -> ServedText | None:
        """The text model, if it is one."""
        return self._runner.text

    @property
    def joins_requests(self) -> bool:
        """True if the model processes the rows of several requests in one batch."""
        return self._runner.joins and self.batching.max_batch_size > 1

    @property
    def waiting(self) -> int:
        """Number of requests that wait for the model."""
        return self._batcher.waiting

    def predict(
        self, inputs: Mapping[str, ArrayLike] | ArrayLike, timeout: float | None = None
    ) -> np.ndarray | dict[str, np.ndarray]:
        """Return the model's outputs for rows of inputs.

        Parameters
        ----------
        inputs : dict of str to ndarray, or ndarray
            All inputs by name, or an array if the model has one input.
        timeout : float, optional
            Seconds after which the call fails.

        Returns
        -------
        ndarray or dict of str to ndarray
            A dict if the model has several outputs.

        Raises
        ------
        UsageError
            If the inputs do not fit the signature.
        OverloadError
            If too many requests wait already.
        DeadlineError
            If the timeout is exceeded.

        Examples
        --------
        >>> import numpy as np
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> import torch
        >>> from bigdl.nano.serving import ServedModel
        >>> model = ServedModel(torch.nn.ReLU(), sample=torch.zeros(1, 1), method="original")
        >>> rows = [np.full((1, 1), number, "float32") for number in (-1, 0, 1)]
        >>> with ThreadPoolExecutor() as threads:
        ...     [float(each[0, 0]) for each in threads.map(model.predict, rows)]
        [0.0, 0.0, 1.0]
        >>> model.close()
        """
        results = self._batcher.call(self.signature.arrays(inputs), timeout)
        return results[0] if len(results) == 1 else self.named(results)

    def submit(self, arrays: list[np.ndarray], timeout: float | None = None) -> Future:
        """Start inference on checked arrays (:meth:`Signature.arrays`) and return a future.

        Returns
        -------
        Future
            Its result is the flat list of outputs. A request cancelled before its batch starts is
            not computed.
        """
        return self._batcher.submit(arrays, timeout)

    def call(self, arrays: list[np.ndarray], timeout: float | None = None) -> list[np.ndarray]:
        """Return the flat list of outputs for checked arrays (:meth:`Signature.arrays`)."""
        return self._batcher.call(arrays, timeout)

    def named(self, results: list[np.ndarray]) -> dict[str, np.ndarray]:
        """Return a flat list of outputs as a dict by output name."""
        names = (spec.name for spec in self.signature.outputs)
        return dict(zip(names, results, strict=True))

    def split(self, common: Sequence[str]) -> SplitNetwork:
        """Split the model into parts for `common` inputs and other inputs, and a joint part.

        Use it to score many candidates of one user: the part for the common inputs runs once, not
        for each row. Each part takes its inputs in the model's order. Requests are not batched.

        Parameters
        ----------
        common : sequence of str
            Names of the inputs that are equal in all rows.

        Raises
        ------
        SplitError
            If the model cannot be split.

        Examples
        --------
        >>> import numpy as np
        >>> import torch
        >>> from bigdl.friesian.models import NCF
        >>> from bigdl.nano.serving import ServedModel
        >>> sample = torch.tensor([1, 2]), torch.tensor([3, 4])
        >>> with ServedModel(NCF(10, 20), sample=sample) as model:
        ...     split = model.split(["user"])
        ...     items = split.own([np.array([3, 4, 5])])
        ...     user = split.common([np.array([1])])
        ...     alone = model.predict({"user": np.array([1] * 3), "item": np.array([3, 4, 5])})
        ...     np.allclose(split.joint(user, items)[0], alone, atol=1e-6)
        True
        """
        names = [each.name for each in self.signature.inputs]
        if unknown := [name for name in common if name not in names]:
            raise SplitError(f"The model has no inputs {unknown}, only {names}")
        if self._runner.network is None:
            raise SplitError(f"A model in {self.platform} is not split, only one in OpenVINO")
        if not self._runner.joins:
            raise SplitError("The rows of the model depend on each other")
        return SplitNetwork(self._runner.network, [names.index(name) for name in common])

    def observe(self, observer: Callable[[BatchReport], None]) -> None:
        """Register a function that a model thread calls with a report of each batch."""
        with self._lock:
            self._observers = [*self._observers, observer]

    def warm_up(self, rows: Sequence[int] | None = None) -> None:
        """Run the model at common batch sizes, so that no request waits for compilation."""
        if self._runner.text is not None:
            rows = (1,)
        for count in rows or (1, 2, 4, self.batching.max_batch_size):
            if count == 1 or self.joins_requests:
                self._runner.run(self._runner.arrays_of(count))

    def close(self) -> None:
        """Answer the waiting requests and refuse later ones."""
        self._batcher.close()
        if self._runner.text is not None:
            self._runner.text.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def report(self, report: BatchReport) -> None:
        """Pass the report of a batch to the observers."""
        for observer in self._observers:
            observer(report)
