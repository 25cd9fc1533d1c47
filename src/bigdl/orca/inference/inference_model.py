"""``InferenceModel``: one model with a fixed number of copies, shared by any number of threads."""

from __future__ import annotations

import copy
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError, hide_frames, require
from bigdl.common.trust import UntrustedFileError, untrusted
from bigdl.orca.inference.runtimes import (
    accelerated_model,
    check_module,
    file_copies,
    module_copies,
    nano_copies,
    nano_files,
    onnx_copies,
    openvino_copies,
    read_model,
    read_openvino,
    saved_files,
)
from bigdl.orca.inference.shipping import ShippedModel


@hide_frames
class InferenceModel:
    """A PyTorch, ONNX, OpenVINO or Nano model that threads can share.

    Each copy serves one thread at a time; a thread waits while all copies are busy.

    Parameters
    ----------
    supported_concurrent_num : int
        Number of copies. Copies of an ONNX Runtime or OpenVINO network share its weights. OpenVINO
        divides the cores among this number of concurrent calls.

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.orca.inference import InferenceModel
    >>> model = InferenceModel(supported_concurrent_num=2)  # for two threads at the same time
    >>> model = model.load_module(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.ReLU()))
    >>> model.predict(np.array([[-1.0, 2.0], [3.0, -4.0]], dtype="float32"))
    array([[0., 2.],
           [3., 0.]], dtype=float32)
    """

    def __init__(self, supported_concurrent_num: int = 1, bigdl_type: str = "float"):
        self._count = check_positive("supported_concurrent_num", supported_concurrent_num)
        self._idle: queue.LifoQueue[Any] | None = None
        self._origin: tuple | None = (
            None  # arguments from which a Spark worker builds the same model
        )

    # -- loading -------------------------------------------------------------------------------

    def load_torch(self, model_path: str, *, trust: bool = False) -> InferenceModel:
        """Load a PyTorch model from a file.

        Parameters
        ----------
        model_path : str
            A TorchScript archive, an exported program (``torch.export``), or a pickled module.
        trust : bool
            Confirm that the file is safe. It can run arbitrary code when it is loaded, even as
            TorchScript, so it is only loaded with ``trust=True``.

        Returns
        -------
        InferenceModel
            This object, as for every ``load`` method.

        Examples
        --------
        >>> import numpy as np
        >>> import torch
        >>> from bigdl.orca.inference import InferenceModel
        >>> torch.jit.script(torch.nn.ReLU()).save("relu.pt")
        >>> model = InferenceModel().load_torch("relu.pt", trust=True)
        >>> model.predict(np.array([[-1.0, 2.0]], dtype="float32"))
        array([[0., 2.]], dtype=float32)
        """
        # ship the file itself: a TorchScript module cannot be pickled
        return self._fill(file_copies, read_model(model_path), str(model_path), trust)

    def load_module(
        self,
        module,
        *,
        accelerate: str | None = None,
        sample: np.ndarray | Sequence[np.ndarray] | None = None,
    ) -> InferenceModel:
        """Load a copy of a module or ``TorchModel``.

        Parameters
        ----------
        module : torch.nn.Module
        accelerate : str, optional
            A Nano acceleration method, e.g. ``"openvino_int8"``. The module is converted (and
            calibrated for int8) in this call, in this process.
        sample : ndarray or sequence of ndarray
            Sample rows, in the form that :meth:`predict` takes, for `accelerate`; use 32 to 256
            rows for int8.

        Examples
        --------
        >>> import numpy as np
        >>> import torch
        >>> from bigdl.orca.inference import InferenceModel
        >>> rows = np.array([[-1.0, 2.0], [3.0, -4.0]], dtype="float32")
        >>> model = InferenceModel()
        >>> model = model.load_module(torch.nn.ReLU(), accelerate="openvino_fp32", sample=rows)
        >>> model.predict(rows)
        array([[0., 2.],
               [3., 0.]], dtype=float32)
        """
        module = module.to_pytorch() if hasattr(module, "to_pytorch") else module
        if accelerate is None:
            return self._fill(module_copies, module)
        from bigdl.nano.pytorch.inference.methods import METHODS

        if accelerate not in METHODS:
            raise UsageError(
                f"accelerate should be the name of a method ({', '.join(METHODS)}), got "
                f"{accelerate!r}",
                code="name-unknown",
                argument="accelerate",
                allowed=list(METHODS),
            )
        if sample is None:
            raise UsageError(
                f"accelerate={accelerate!r} needs sample rows to convert the model; pass sample=",
                code="argument-missing",
                argument="sample",
                method=accelerate,
            )
        torch = require("torch", "orca")
        arguments = tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in _as_arrays(sample))
        check_module(module)
        model = copy.deepcopy(module).eval()
        converted = accelerated_model(model, accelerate, [arguments], None)
        if converted is model:
            return self._fill(module_copies, module)
        return self._fill(nano_copies, saved_files(converted), model, True)

    def load_onnx(self, path: str) -> InferenceModel:
        """Load an ONNX model from a file (requires onnxruntime)."""
        return self._fill(onnx_copies, read_model(path))

    def load_openvino(
        self, model_path: str, weight_path: str | None = None, batch_size: int = 0
    ) -> InferenceModel:
        """Load an OpenVINO model.

        Parameters
        ----------
        model_path : str
            Path of the ``.xml`` file.
        weight_path : str, optional
            Path of the ``.bin`` file; default the path of the ``.xml`` file with this suffix.
        batch_size : int
            Batch size to fix in the model; 0 keeps the model's batch dimension.
        """
        return self._fill(openvino_copies, *read_openvino(model_path, weight_path), batch_size)

    load_openvino_ng = load_openvino

    def load_nano(
        self, path: str | os.PathLike, module=None, *, trust: bool = False
    ) -> InferenceModel:
        """Load an accelerated model that Nano saved.

        Parameters
        ----------
        path : str or path
            A directory that ``InferenceOptimizer.save`` wrote.
        module : torch.nn.Module, optional
            The original module, required if the directory holds weights only.
        trust : bool
            Load a PyTorch graph without a signature of this user, as in
            ``InferenceOptimizer.load``.
        """
        files = nano_files(path)
        try:
            copies = nano_copies(self._count, files, module, trust)
        except UntrustedFileError:
            raise untrusted(path, "a saved graph of PyTorch") from None
        return self._take(
            copies, (nano_copies, files, module, True)
        )  # workers cannot verify the signature: they have other keys

    def load_bigdl(self, model_path: str, weight_path: str | None = None) -> NoReturn:
        """Raise an error: models of BigDL's JVM layers cannot be loaded."""
        advice = "export the model to ONNX or PyTorch and use load_onnx or load_torch"
        _refuse("Models of BigDL's JVM layers", advice, model_path)

    def load(self, model_path: str, weight_path: str | None = None) -> NoReturn:
        """Raise an error: models of BigDL's JVM layers cannot be loaded."""
        self.load_bigdl(model_path, weight_path)

    def load_caffe(self, model_path: str, weight_path: str) -> NoReturn:
        """Raise an error: Caffe models cannot be loaded."""
        _refuse("Models of Caffe", "convert the model to ONNX and use load_onnx", model_path)

    def load_tensorflow(self, model_path: str, *args: object, **kwargs: object) -> NoReturn:
        """Raise an error: TensorFlow 1 graphs cannot be loaded."""
        advice = "convert the model to OpenVINO or ONNX and use load_openvino or load_onnx"
        _refuse("Graphs of TensorFlow 1", advice, model_path)

    def _fill(self, make_copies: Callable[..., list], *parts: object) -> InferenceModel:
        """Build the copies with ``make_copies(count, *parts)``; Spark workers repeat this call."""
        return self._take(make_copies(self._count, *parts), (make_copies, *parts))

    def _take(self, copies: list, origin: tuple) -> InferenceModel:
        idle: queue.LifoQueue[Any] = queue.LifoQueue()
        for each in copies:
            idle.put(each)
        self._idle, self._origin = idle, origin
        return self

    @property
    def origin(self) -> tuple:
        """Picklable function and arguments that build the copies, for :meth:`of_origin`."""
        self._require_model()
        return cast("tuple", self._origin)

    @classmethod
    def of_origin(cls, origin: tuple, threads: int | None = None) -> InferenceModel:
        """Build the model in a Spark worker from `origin`, with `threads` threads per call."""
        make_copies, *parts = origin
        return cls()._take(make_copies(1, *parts, threads=threads), origin)

    # -- prediction ----------------------------------------------------------------------------

    def predict(self, inputs, batch_size: int | None = None):
        """Return the model's outputs for a batch; several threads may call it concurrently.

        Parameters
        ----------
        inputs : ndarray or sequence of ndarray
            One array per input of the model.
        batch_size : int, optional
            Number of rows per forward pass; default all rows.

        Returns
        -------
        ndarray or list of ndarray
            A list if the model has several outputs.
        """
        arrays = _as_arrays(inputs)
        rows = len(arrays[0])
        step = batch_size or max(rows, 1)
        with self._copy() as copy:
            if rows <= step:
                joined = copy(arrays)
            else:
                lows = range(0, rows, step)
                pieces = [copy([a[low : low + step] for a in arrays]) for low in lows]
                joined = [np.concatenate(parts) for parts in zip(*pieces, strict=True)]
        return joined[0] if len(joined) == 1 else joined

    def distributed_predict(self, inputs, sc=None):
        """Run the model on every element of an RDD; elements are batches as for :meth:`predict`.

        Parameters
        ----------
        inputs : pyspark.RDD
        sc : pyspark.SparkContext, optional
            Default the RDD's SparkContext.

        Returns
        -------
        pyspark.RDD
            The outputs, computed lazily, in the order of `inputs`.
        """
        shipped = ShippedModel(_ShippedInferenceModel(self.origin, 1), sc or inputs.context, ())
        model_of_task = shipped.in_task(1)

        def predict(batches: Iterable) -> Iterator:
            with model_of_task() as model:
                for batch in batches:
                    yield model(batch)

        return inputs.mapPartitions(predict)

    @contextmanager
    def _copy(self):
        self._require_model()
        idle = self._idle  # another load may replace it in the meantime
        copy = idle.get()
        try:
            yield copy
        finally:
            idle.put(copy)

    def _require_model(self):
        if self._idle is None:
            raise UsageError(
                "No model is loaded; call load_torch, load_onnx, load_openvino or load_nano first",
                code="not-fitted",
            )


@dataclass(frozen=True)
class _ShippedInferenceModel:
    """Function and arguments that rebuild an InferenceModel, as shipped to tasks."""

    origin: tuple
    threads: int

    def load_on(self, device: object) -> _LoadedInferenceModel:
        return _LoadedInferenceModel(InferenceModel.of_origin(self.origin, self.threads))


@dataclass(frozen=True)
class _LoadedInferenceModel:
    """Adapter that lets tasks call an InferenceModel as a LoadedModel."""

    model: InferenceModel
    squeezes: bool = False

    def __call__(self, batch: np.ndarray | Sequence[np.ndarray]) -> np.ndarray | list[np.ndarray]:
        return self.model.predict(batch)


def _refuse(models: str, advice: str, path: str) -> NoReturn:
    raise UsageError(
        f"{models} cannot be loaded; {advice} instead of loading {path!r}",
        code="name-dropped",
        path=path,
    )


def _as_arrays(inputs: object) -> list[np.ndarray]:
    items: Sequence[Any] = inputs if isinstance(inputs, list | tuple) else [inputs]
    if not items:
        raise UsageError(
            "predict needs an array, or a list with one array per model input; got none",
            code="argument-missing",
            argument="inputs",
        )
    arrays = [np.asarray(each) for each in items]
    if any(a.ndim == 0 or a.dtype == object for a in arrays):
        raise UsageError(
            "predict takes an array of rows, or a list with one array per model input, "
            f"got {type(inputs).__name__}",
            code="data-type",
            argument="inputs",
        )
    if len({len(a) for a in arrays}) > 1:
        raise UsageError(
            f"All inputs must have the same number of rows, got {[len(a) for a in arrays]}",
            code="data-shape",
            argument="inputs",
        )
    return arrays
