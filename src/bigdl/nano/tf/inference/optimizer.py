"""InferenceOptimizer for Keras: selection of the fastest acceleration method for a model."""

import pickle
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import keras

from bigdl.common.checks import check_positive
from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError, hide_frames, require
from bigdl.common.placeholders import resolve_placeholder
from bigdl.nano.acceleration.accuracy import AccuracyOptions, score_function
from bigdl.nano.acceleration.agreement import build_and_check
from bigdl.nano.acceleration.autotune import warn_if_slower
from bigdl.nano.acceleration.method import (
    ORIGINAL,
    BuildOptions,
    Method,
    MethodChoice,
    select_quantize_method,
    select_trace_method,
)
from bigdl.nano.acceleration.precision import FP32, INT8, WeightOptions
from bigdl.nano.acceleration.search.optimizer import BaseInferenceOptimizer
from bigdl.nano.acceleration.search.trial import Bench, Candidate, SearchOptions, Trial
from bigdl.nano.acceleration.structure import ModelBatch
from bigdl.nano.openvino.methods import OpenVINOMethod
from bigdl.nano.tf.inference.accelerated import (
    AcceleratedKerasModel,
    KerasOpenVINOModel,
    load_model,
    save_model,
)
from bigdl.nano.tf.inference.methods import DEFAULT_METHODS, METHODS
from bigdl.nano.tf.inference.source import (
    KerasSource,
    batches_of,
    first_rows,
)
from bigdl.nano.tf.serialization import dumps, packed, unpacked

_ROWS = 32


def score_of(metric: object, data: object, source: KerasSource) -> Callable[[Any], float]:
    """Return a function that scores a model on data.

    Parameters
    ----------
    metric : keras.metrics.Metric or callable
        A Metric, or a callable with parameters for predictions and targets (one name contains
        "pred", another "target", "true" or "label"), is computed on the model's predictions;
        other callables are called as ``metric(model, data)``, or ``metric(model)`` without data.
    data : Dataset, tuple or None
        ``(x, y)`` or a dataset of such pairs.
    source : KerasSource
        Source with the model's inputs.

    Raises
    ------
    UsageError
        If the metric is no callable, or needs targets and the data have none.
    """
    streaming = None
    if isinstance(metric, keras.metrics.Metric):
        streaming = SimpleNamespace(
            reset=metric.reset_state,
            update=lambda predicted, targets: metric.update_state(targets, predicted),
            compute=metric.result,
        )
    elif not callable(metric):
        raise UsageError(
            "metric should be a tf.keras.metrics.Metric or a Callable",
            code="argument-type",
            argument="metric",
        )
    if isinstance(data, tuple) and len(data) == 2 and hasattr(data[0], "element_spec"):
        data = data[0]  # the dataset contains the targets
    pair = data if isinstance(data, tuple) else (data, None)

    def predictions(model: keras.Model) -> Iterator[tuple[Any, Any, int]]:
        inputs = source.inputs
        for arrays, targets in batches_of(pair, inputs, _ROWS):
            yield model(*inputs.pack(arrays)), targets, len(arrays[0])

    return score_function(
        metric,
        data,
        predictions,
        streaming=streaming,
        target_words=("target", "true", "label"),
    )


_CALIBRATION_ROWS = 100


class KerasBench(Bench):
    """Model, data and methods of a search, sent to the process that tries the methods.

    It keeps data as ndarrays, so that it can be pickled to another process. There the number of
    TensorFlow threads is set before the model is built, because it cannot be changed later.

    Parameters
    ----------
    methods : mapping of str to Method
    model, thread_num, metric
        See :class:`~bigdl.nano.acceleration.search.trial.Bench`.
    data : tuple
        `x` and `y` of ``InferenceOptimizer.optimize``.
    validation_data, input_spec, batch_size
        Arguments of ``InferenceOptimizer.optimize``.
    """

    def __init__(
        self,
        methods: Mapping[str, Method],
        model: keras.Model,
        thread_num: int | None,
        metric: object,
        data: tuple[Any, Any],
        validation_data: object,
        input_spec: object,
        batch_size: int,
    ):
        super().__init__(methods, model, thread_num, metric)
        self.library_threads = core_count()
        rows = check_positive("batch_size", batch_size)
        self._input_spec = input_spec
        source = KerasSource(self.model, self._input_spec, *data)
        self._calibration = first_rows(data, source.inputs, _CALIBRATION_ROWS)
        sample = source.inputs.pack(first_rows(data, source.inputs, rows))
        self._batches = [ModelBatch(sample, {"training": False})]
        self._inputs = source.inputs
        self._options = BuildOptions(sample_size=_CALIBRATION_ROWS)
        self._validation_data = validation_data
        if self.has_metric:
            score_of(self._metric, self._validation_data, source)  # refuses an invalid metric

    @cached_property
    def _source(self) -> KerasSource:
        x = self._inputs.pack(self._calibration)
        return KerasSource(self.model, self._input_spec, x[0] if len(x) == 1 else x)

    def __getstate__(self) -> dict:
        scored = {"_metric": dumps((self._metric, self._validation_data)), "_validation_data": None}
        return super().__getstate__() | {"model": packed(self.model), **scored}

    def __setstate__(self, state: dict) -> None:
        if state["thread_num"] is not None:  # before TensorFlow is used, in another process
            with suppress(RuntimeError):  # in the caller's process the number stays unchanged
                tf = require("tensorflow", "tf")
                tf.config.threading.set_intra_op_parallelism_threads(state["thread_num"])
        self.__dict__.update(state)
        self.model = unpacked(state["model"])
        self._metric, self._validation_data = pickle.loads(state["_metric"])

    def build(self, method: Method, threads: int | None) -> Candidate:
        if method.name == ORIGINAL:
            return Candidate(self.model, nullcontext)
        options = replace(self._options, thread_num=threads)
        built = build_and_check(method, self._source, options, scored=self.has_metric)
        return Candidate(built, nullcontext)

    def score(self, candidate: Candidate) -> float:
        return score_of(self._metric, self._validation_data, self._source)(candidate.model)

    save = staticmethod(save_model)

    def load(self, directory: Path) -> Candidate:
        return Candidate(load_model(directory, trust=True), nullcontext)  # saved by this search


@dataclass(frozen=True)
class KerasData:
    """Arguments of ``trace`` and ``quantize`` that describe the model's input."""

    input_spec: object = None
    x: object = None
    y: object = None
    batch: int | None = None

    def source(self, model: keras.Model) -> KerasSource:
        """Return a :class:`KerasSource` with the model and these input descriptions."""
        return KerasSource(model, self.input_spec, self.x, self.y, self.batch)


@hide_frames
class InferenceOptimizer(BaseInferenceOptimizer[keras.Model]):
    """Accelerator of Keras models for inference; the original model is not changed.

    ``trace`` and ``quantize`` apply one method selected by its properties, ``build`` one selected
    by name; ``optimize`` tries many and measures each. Accelerated models are called, predict and
    evaluate like the original.

    Attributes
    ----------
    ALL_INFERENCE_ACCELERATION_METHOD : mapping of str to Method
        The ten methods that ``optimize`` tries by default.
    DEFAULT_INFERENCE_ACCELERATION_METHOD : mapping of str to Method
        The same methods.

    Examples
    --------
    >>> import keras
    >>> import numpy as np
    >>> from bigdl.nano.tf.keras import InferenceOptimizer
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    >>> x = np.random.rand(8, 4).astype("float32")
    >>> fast = InferenceOptimizer.trace(model, accelerator="openvino")
    >>> bool(np.allclose(fast.predict(x), model.predict(x, verbose=0), atol=1e-5))
    True

    Let it try methods and choose the fastest that keeps the accuracy:

    >>> y = model.predict(x, verbose=0).argmax(axis=1)
    >>> optimizer = InferenceOptimizer()
    >>> optimizer.optimize(
    ...     model, x, validation_data=(x, y), metric=keras.metrics.SparseCategoricalAccuracy(),
    ...     batch_size=8, includes=["openvino_fp32"],
    ... )
    -------------------------------- ...
    | method | status | latency(ms) | speedup | metric value |
    ...
    | original | successful | ... | 1.00x | ... |
    | openvino_fp32 | ...
    Optimization cost ...s in total.
    >>> best, option = optimizer.get_best_model(accuracy_criterion=0.01)
    >>> option in ("original", "openvino")
    True
    """

    ALL_INFERENCE_ACCELERATION_METHOD: ClassVar[Mapping[str, Method]] = DEFAULT_METHODS
    DEFAULT_INFERENCE_ACCELERATION_METHOD: ClassVar[Mapping[str, Method]] = DEFAULT_METHODS

    _framework = "keras"
    _methods = METHODS
    _data_argument = "x"
    _data_class = KerasData
    # programs pass the data and batch size for any precision
    _always = frozenset(("input_spec", "x", "y", "batch", "sample_size"))
    _model_class, _accelerated_class = keras.Model, AcceleratedKerasModel
    _nouns = ("Keras Model", "Keras Model")
    _score_of = staticmethod(score_of)

    @classmethod
    def _compare_speed(
        cls, method: Method, source: KerasSource, built: keras.Model, options: BuildOptions
    ) -> None:
        if method.precision == FP32 or options.device != "CPU" or source.data[0] is None:
            return
        model, sample = source.model, source.inputs.pack(source.sample_arrays())
        weights = [(each.path, list(each.shape)) for each in model.weights]
        warn_if_slower(
            method,
            lambda: model(*sample, training=False),
            lambda: built(*sample),
            type(model).__qualname__,
            weights,
            options.thread_num,
        )

    @staticmethod
    def trace(
        model: keras.Model,
        accelerator: str | None = None,
        input_spec: object = None,
        thread_num: int | None = None,
        device: str = "CPU",
        onnxruntime_session_options: object = None,
        openvino_config: Mapping | None = None,
        logging: bool = True,
        strict_check: bool = True,
        **kwargs: object,
    ) -> keras.Model:
        """Return an fp32 model accelerated with another runtime.

        Parameters
        ----------
        model : keras.Model
            Model to accelerate; not changed.
        accelerator : {"openvino", "onnxruntime"}
        input_spec : tf.TensorSpec, or list or dict of them, optional
            Input of the model; only required for a subclass of ``keras.Model``.
        thread_num : int, optional
            Number of threads of the runtime.
        device : str
            OpenVINO device: ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"VPUX"`` or ``"NPU"``.
        onnxruntime_session_options : onnxruntime.SessionOptions, optional
        openvino_config : mapping, optional
            Properties for OpenVINO's ``compile_model``.
        logging : bool
            Accepted for compatibility; conversions print nothing.
        strict_check : bool
            Compare the accelerated model with the original, on the sample and on inputs derived
            from it.
        **kwargs
            Keywords of OpenVINO's conversion (``mean_value``, ``layout``, …), or ``opset`` for
            ONNX.

        Returns
        -------
        keras.Model

        Raises
        ------
        UsageError
            If the arguments select no method, an argument does not apply to it, this machine does
            not support the method, or the model cannot be converted.
        """
        choice = MethodChoice(accelerator=accelerator)
        options = BuildOptions(
            thread_num=thread_num,
            onnxruntime_session_options=onnxruntime_session_options,
            device=device,
            openvino_config=openvino_config,
            conversion=kwargs,
        )
        return InferenceOptimizer._accelerate(
            model,
            select_trace_method("keras", choice, options),
            choice,
            options,
            AccuracyOptions(),
            KerasData(input_spec),
            strict_check,
        )

    @staticmethod
    def quantize(
        model: keras.Model,
        x: object = None,
        y: object = None,
        precision: str = INT8,
        accelerator: str | None = None,
        input_spec: object = None,
        eval_func: Callable | None = None,
        metric: object = None,
        accuracy_criterion: Mapping | None = None,
        approach: str = "static",
        method: str | None = None,
        conf: object = None,
        tuning_strategy: str | None = None,
        timeout: float | None = None,
        max_trials: int | None = None,
        batch: int | None = None,
        thread_num: int | None = None,
        device: str = "CPU",
        custom_objects: object = None,
        inputs: object = None,
        outputs: object = None,
        sample_size: int = 100,
        onnxruntime_session_options: object = None,
        openvino_config: Mapping | None = None,
        logging: bool = True,
        strict_check: bool = True,
        weight_options: WeightOptions | None = None,
        **kwargs: object,
    ) -> keras.Model:
        """Return a model quantized to bf16, fp16, int8 or int4.

        Parameters
        ----------
        model : keras.Model
            Model to quantize; not changed.
        x, y : optional
            Data for the calibration of int8 and for `metric`: arrays, tensors, lists or dicts of
            them, or a ``tf.data.Dataset`` of pairs. Without data, random numbers are used.
        precision : {"int8", "bf16", "fp16", "int4"} or Precision
            int4 quantizes only weights, in groups, with OpenVINO; embeddings and the last layer
            have 8 bits, and no calibration data are needed.
        accelerator, input_spec, thread_num, device
            See :meth:`trace`. Without `accelerator`, bf16 uses Keras' ``mixed_bfloat16`` and int8
            OpenVINO.
        eval_func : callable, optional
            Function that returns the score of a model: an alternative to `metric`.
        metric : keras.metrics.Metric or callable, optional
            With it, and with `y`, int8 keeps the accuracy within `accuracy_criterion`, or raises
            an error.
        accuracy_criterion : dict, optional
            ``{"relative": 0.01, "higher_is_better": True}`` (the default) or ``"absolute"``.
        approach : {"static"}
        method : str, optional
            A variant: ``"qlinear"``, ``"integer"`` or ``"nncf"`` with ONNX Runtime,
            ``"weight_only"`` or ``"bf16"`` (the rest in bf16) with OpenVINO.
        conf, tuning_strategy, custom_objects, inputs, outputs
            Accepted for programs written for Neural Compressor, without effect.
        timeout : float, optional
            Seconds after which no further layer selection is tried; 0 sets no limit.
        max_trials : int, optional
            Largest number of quantized models to score.
        batch : int, optional
            Number of rows of a calibration batch.
        sample_size : int
            Number of rows for calibration.
        weight_options : WeightOptions, optional
            Options of int4, and of int8 with ``method="weight_only"`` and OpenVINO: group size,
            symmetry, share of layers in int8, AWQ, scale estimation.
        onnxruntime_session_options, openvino_config, logging, **kwargs
            See :meth:`trace`.

        Returns
        -------
        keras.Model

        Raises
        ------
        UsageError
            For the reasons of :meth:`trace`, or if the accuracy criterion cannot be met.

        Examples
        --------
        >>> import keras
        >>> import numpy as np
        >>> from bigdl.nano.tf.keras import InferenceOptimizer
        >>> model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(2)])
        >>> x = np.random.rand(64, 16).astype("float32")
        >>> small = InferenceOptimizer.quantize(model, x, accelerator="onnxruntime")  # int8
        >>> bool(np.allclose(small.predict(x), model.predict(x, verbose=0), atol=0.1))
        True
        """
        if approach != "static":
            raise UsageError(
                "Only 'static' approach is supported now.",
                code="argument-value",
                argument="approach",
                allowed=["static"],
            )
        choice = MethodChoice(precision, accelerator, approach, method)
        options = BuildOptions(
            thread_num=thread_num,
            onnxruntime_session_options=onnxruntime_session_options,
            device=device,
            openvino_config=openvino_config,
            sample_size=sample_size,
            weight_options=weight_options,
            conversion=kwargs,
        )
        return InferenceOptimizer._accelerate(
            model,
            select_quantize_method("keras", choice, options),
            choice,
            options,
            AccuracyOptions(metric, eval_func, accuracy_criterion, timeout, max_trials),
            KerasData(input_spec, x, y, batch),
            strict_check,
        )

    def optimize(
        self,
        model: keras.Model,
        x: object,
        y: object = None,
        validation_data: object = None,
        input_spec: object = None,
        batch_size: int = 1,
        metric: object = None,
        direction: str = "max",
        thread_num: int | None = None,
        logging: bool = False,
        latency_sample_num: int = 100,
        includes: Collection[str] | None = None,
        excludes: Collection[str] | None = None,
        output_filename: str | None = None,
        *,
        time_limit: float | None = None,
        memory_limit: int | None = None,
    ) -> None:
        """Try acceleration methods on a model: convert, check, time and score each.

        Each method runs in a separate process, so that a hang, a crash or excessive memory use
        affects only its row. It is timed in alternation with ``model(x)``. The table is printed at
        the end; :meth:`summary`, :meth:`results` and :meth:`plot` show it again.

        Parameters
        ----------
        model : keras.Model
            Model to accelerate; not changed.
        x, y
            See :meth:`quantize`; the first rows of `x` are the timed sample.
        validation_data : tuple or tf.data.Dataset, optional
            ``(x, y)``, or a dataset of such pairs, for `metric`.
        input_spec : optional
            See :meth:`trace`.
        batch_size : int
            Number of rows of the sample.
        metric : keras.metrics.Metric or callable, optional
            A Metric, or a callable with parameters for predictions and targets (names that contain
            "pred", and "target", "true" or "label"), whose results are averaged over the rows; or
            another callable, called as ``metric(model, validation_data)``, or as
            ``metric(model)`` without validation data.
        direction : {"max", "min"}
            ``"max"`` if a higher metric is better, else ``"min"``.
        thread_num : int, optional
            Number of threads of every model, including the original.
        logging : bool
            Show the output of methods, and a progress bar even without a terminal.
        latency_sample_num : int
            Number of timed calls; fewer if they take more than ten seconds.
        includes : list of str, optional
            Methods to try in addition to the original.
        excludes : list of str, optional
            Methods not to try; the original is always tried.
        output_filename : str, optional
            File for the table.
        time_limit : float, optional
            Seconds for one method. Default: 20 times the time of the original, at least 300.
        memory_limit : int, optional
            Bytes of resident memory of the process that tries methods. Default: 90 % of the free
            memory at the start.

        Raises
        ------
        UsageError
            If an argument is invalid, or the original does not run on the data or the metric.
        """
        model = resolve_placeholder(model)
        self._check_model(model)
        options = SearchOptions(
            direction=direction,
            thread_num=thread_num,
            logging=logging,
            latency_sample_num=latency_sample_num,
            includes=includes,
            excludes=excludes,
            output_filename=output_filename,
            time_limit=time_limit,
            memory_limit=memory_limit,
        )
        bench = KerasBench(
            self._to_try(options),
            model,
            thread_num,
            metric,
            (x, y),
            validation_data,
            input_spec,
            batch_size,
        )
        self._search(bench, options)

    def get_best_model(
        self,
        accelerator: str | None = None,
        precision: str | None = None,
        accuracy_criterion: float | None = None,
    ) -> tuple[keras.Model, str]:
        """Return the fastest model.

        Parameters
        ----------
        accelerator : {"openvino", "onnxruntime"}, optional
            Consider only models of this runtime.
        precision : {"fp32", "bf16", "fp16", "int8", "int4"}, optional
            Consider only models of this precision.
        accuracy_criterion : float, optional
            Largest allowed drop of the accuracy, as a fraction of the original's.

        Returns
        -------
        model : keras.Model
        option : str
            Description of the method, e.g. ``"openvino + int8"`` or ``"original"``.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called, no successful model matches, or there is a
            criterion but no accuracy.
        """
        return self._best(accelerator, precision, None, accuracy_criterion)

    save = staticmethod(save_model)
    load = staticmethod(load_model)

    @classmethod
    def _takes(cls, model: keras.Model, method: Method | None) -> bool:
        quantizes = isinstance(method, OpenVINOMethod) and method.precision != FP32
        return quantizes and isinstance(model, KerasOpenVINOModel)

    def _original(self, trial: Trial) -> keras.Model:
        return self._bench.model
