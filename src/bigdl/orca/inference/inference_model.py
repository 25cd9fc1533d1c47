"""InferenceModel: one model, a fixed number of copies, any number of threads."""

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
from bigdl.common.errors import UsageError, require
from bigdl.common.trust import UntrustedFileError, untrusted
from bigdl.orca.inference.runtimes import (
    accelerated_model,
    file_copies,
    module_copies,
    nano_copies,
    nano_files,
    need_module,
    onnx_copies,
    openvino_copies,
    read_model,
    read_openvino,
    saved_files,
)
from bigdl.orca.inference.shipping import ShippedModel


class InferenceModel:
    """A model of PyTorch, ONNX, OpenVINO or Nano that threads share.

    Every copy works for one thread at a time; a thread that finds all of them busy waits.

    Parameters
    ----------
    supported_concurrent_num : int
        How many copies there are. The copies of a network in ONNX Runtime or OpenVINO share its
        weights; in OpenVINO so many calls at the same time share the cores.

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
        self._origin: tuple | None = None  # how a worker of Spark gets the same model

    # -- loading -------------------------------------------------------------------------------

    def load_torch(self, model_path: str, *, trust: bool = False) -> InferenceModel:
        """Read a model of PyTorch.

        Parameters
        ----------
        model_path : str
            A TorchScript archive, an exported program (``torch.export``), or a pickled module.
        trust : bool
            Such a file can run any code, a script of TorchScript, too: it is read only with
            ``trust=True``.

        Returns
        -------
        InferenceModel
            Itself, as from every ``load``.

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
        # the file is shipped: a script has no pickle
        return self._fill(file_copies, read_model(model_path), str(model_path), trust)

    def load_module(
        self, module, *, accelerate: str | None = None, sample: Any = None
    ) -> InferenceModel:
        """Take a module (or a ``TorchModel``); it is copied.

        Parameters
        ----------
        module : torch.nn.Module
        accelerate : str, optional
            A method of Nano, e.g. ``"openvino_int8"``: the module is converted, and calibrated for
            int8, now and here.
        sample : ndarray or sequence of ndarray
            Some rows as :meth:`predict` takes them, for `accelerate`; 32 to 256 are good for int8.

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
                f"accelerate={accelerate!r} needs some rows to convert the model with; "
                "pass sample=",
                code="argument-missing",
                argument="sample",
                method=accelerate,
            )
        torch = require("torch", "orca")
        arguments = tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in _as_arrays(sample))
        need_module(module)
        model = copy.deepcopy(module).eval()
        converted = accelerated_model(model, accelerate, [arguments], None)
        if converted is model:
            return self._fill(module_copies, module)
        return self._fill(nano_copies, saved_files(converted), model, True)

    def load_onnx(self, path: str) -> InferenceModel:
        """Read an ONNX model (needs onnxruntime)."""
        return self._fill(onnx_copies, read_model(path))

    def load_openvino(
        self, model_path: str, weight_path: str | None = None, batch_size: int = 0
    ) -> InferenceModel:
        """Read a model of OpenVINO.

        Parameters
        ----------
        model_path : str
            The ``.xml``.
        weight_path : str, optional
            The ``.bin``; default the one beside it.
        batch_size : int
            Fix the batch of the model; 0 leaves it as it is.
        """
        return self._fill(openvino_copies, *read_openvino(model_path, weight_path), batch_size)

    load_openvino_ng = load_openvino

    def load_nano(
        self, path: str | os.PathLike, module=None, *, trust: bool = False
    ) -> InferenceModel:
        """Read an accelerated model of Nano.

        Parameters
        ----------
        path : str or path
            A directory that ``InferenceOptimizer.save`` wrote.
        module : torch.nn.Module, optional
            The original, where the directory holds weights only.
        trust : bool
            Load a graph of PyTorch that no program of this user has signed, as of
            ``InferenceOptimizer.load``.
        """
        files = nano_files(path)
        try:
            copies = nano_copies(self._count, files, module, trust)
        except UntrustedFileError:
            raise untrusted(path, "a saved graph of PyTorch") from None
        return self._take(copies, (nano_copies, files, module, True))  # workers have other keys

    def load_bigdl(self, model_path: str, weight_path: str | None = None) -> NoReturn:
        """Models of BigDL's JVM layers cannot be read."""
        advice = "export the model to ONNX or PyTorch and use load_onnx or load_torch"
        _refuse("Models of BigDL's JVM layers", advice, model_path)

    def load(self, model_path: str, weight_path: str | None = None) -> NoReturn:
        """Models of BigDL's JVM layers cannot be read."""
        self.load_bigdl(model_path, weight_path)

    def load_caffe(self, model_path: str, weight_path: str) -> NoReturn:
        """Models of Caffe cannot be read."""
        _refuse("Models of Caffe", "convert the model to ONNX and use load_onnx", model_path)

    def load_tensorflow(self, model_path: str, *args: Any, **kwargs: Any) -> NoReturn:
        """Graphs of TensorFlow 1 cannot be read."""
        advice = "convert the model to OpenVINO or ONNX and use load_openvino or load_onnx"
        _refuse("Graphs of TensorFlow 1", advice, model_path)

    def _fill(self, make_copies: Callable[..., list], *parts: Any) -> InferenceModel:
        """Take the copies ``make_copies(count, *parts)``; a worker of Spark makes its own so."""
        return self._take(make_copies(self._count, *parts), (make_copies, *parts))

    def _take(self, copies: list, origin: tuple) -> InferenceModel:
        idle: queue.LifoQueue[Any] = queue.LifoQueue()
        for each in copies:
            idle.put(each)
        self._idle, self._origin = idle, origin
        return self

    @property
    def origin(self) -> tuple:
        """The parts of the copies, which can be pickled, for :meth:`of_origin`."""
        self._need_model()
        return cast("tuple", self._origin)

    @classmethod
    def of_origin(cls, origin: tuple, threads: int | None = None) -> InferenceModel:
        """Return the model in a worker of Spark, where each call computes with so many threads."""
        make_copies, *parts = origin
        return cls()._take(make_copies(1, *parts, threads=threads), origin)

    # -- prediction ----------------------------------------------------------------------------

    def predict(self, inputs, batch_size: int | None = None):
        """Outputs for a batch; threads may call it at the same time.

        Parameters
        ----------
        inputs : ndarray or sequence of ndarray
            Several are the several inputs of the model.
        batch_size : int, optional
            Rows of one forward pass; default all.

        Returns
        -------
        ndarray or list of ndarray
            A list for a model of several outputs.
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
        """Predict the elements of an RDD, each a batch as :meth:`predict` takes it.

        Parameters
        ----------
        inputs : pyspark.RDD
        sc : pyspark.SparkContext, optional
            Default that of the RDD.

        Returns
        -------
        pyspark.RDD
            The outputs, lazily and in the same order.
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
        self._need_model()
        idle = self._idle  # another load may replace it meanwhile
        copy = idle.get()
        try:
            yield copy
        finally:
            idle.put(copy)

    def _need_model(self):
        if self._idle is None:
            raise UsageError(
                "There is no model yet; call load_torch, load_onnx, load_openvino or load_nano "
                "first",
                code="not-fitted",
            )


@dataclass(frozen=True)
class _ShippedInferenceModel:
    """The parts that tasks make an InferenceModel of."""

    origin: tuple
    threads: int

    def load_on(self, device: Any) -> _LoadedInferenceModel:
        return _LoadedInferenceModel(InferenceModel.of_origin(self.origin, self.threads))


@dataclass(frozen=True)
class _LoadedInferenceModel:
    """An InferenceModel as tasks call it."""

    model: InferenceModel
    squeezes: bool = False

    def __call__(self, batch: Any) -> Any:
        return self.model.predict(batch)


def _refuse(models: str, advice: str, path: str) -> NoReturn:
    raise UsageError(
        f"{models} cannot be read; {advice} instead of loading {path!r}",
        code="name-dropped",
        path=path,
    )


def _as_arrays(inputs: Any) -> list[np.ndarray]:
    given: Sequence[Any] = inputs if isinstance(inputs, list | tuple) else [inputs]
    if not given:
        raise UsageError(
            "predict needs an array, or one for each input of the model; got none",
            code="argument-missing",
            argument="inputs",
        )
    arrays = [np.asarray(each) for each in given]
    if any(a.ndim == 0 or a.dtype == object for a in arrays):
        raise UsageError(
            "predict takes an array of rows, or a list of them for several inputs of the model, "
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
