"""InferenceOptimizer for Keras: one model, made faster in the way that suits it best."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, ClassVar

import keras

from bigdl.common.checks import check_positive
from bigdl.common.cpu import core_count
from bigdl.common.errors import UsageError
from bigdl.common.stand_ins import actual
from bigdl.nano.acceleration.keywords import Keywords, MethodTable, check_threads, options_of
from bigdl.nano.acceleration.method import Method, find_method
from bigdl.nano.acceleration.search.cache import Cache
from bigdl.nano.acceleration.search.isolation import Limits
from bigdl.nano.acceleration.search.optimizer import BaseInferenceOptimizer, check_direction
from bigdl.nano.acceleration.search.results import choose
from bigdl.nano.acceleration.search.trial import Plan, Trial
from bigdl.nano.tf.inference.accelerated import AcceleratedKerasModel, load_model, save_model
from bigdl.nano.tf.inference.bench import KerasBench, accuracy_goal
from bigdl.nano.tf.inference.source import KerasSource
from bigdl.nano.tf.methods import DEFAULT_METHODS, METHODS

__all__ = ["InferenceOptimizer"]

_TABLE = MethodTable(
    accelerators=("openvino", "onnxruntime", None), int8={None: {None: "static_int8"}}
)


class InferenceOptimizer(BaseInferenceOptimizer[keras.Model]):
    """Makes a Keras model faster without changing it.

    ``trace`` and ``quantize`` apply one method that the caller names by its properties, ``build``
    one by its name; ``optimize`` tries many and measures each. What comes back is called, predicts
    and evaluates as the original does.

    Attributes
    ----------
    ALL_INFERENCE_ACCELERATION_METHOD : mapping of str to Method
        The ten methods that are tried unasked.
    DEFAULT_INFERENCE_ACCELERATION_METHOD : mapping of str to Method
        The same.

    Examples
    --------
    >>> fast = InferenceOptimizer.trace(model, accelerator="openvino")
    >>> y = fast.predict(x)

    >>> optimizer = InferenceOptimizer()
    >>> optimizer.optimize(model, x, validation_data=(x, y), metric=accuracy, batch_size=32)
    >>> best, option = optimizer.get_best_model(accuracy_criterion=0.01)
    """

    ALL_INFERENCE_ACCELERATION_METHOD: ClassVar[Mapping[str, Method]] = DEFAULT_METHODS
    DEFAULT_INFERENCE_ACCELERATION_METHOD: ClassVar[Mapping[str, Method]] = DEFAULT_METHODS

    _methods = METHODS
    _data_argument = "x"
    _bench: KerasBench

    @staticmethod
    def trace(
        model: keras.Model,
        accelerator: str | None = None,
        input_spec: Any = None,
        thread_num: int | None = None,
        device: str = "CPU",
        onnxruntime_session_options: Any = None,
        openvino_config: Mapping | None = None,
        logging: bool = True,
        **kwargs: Any,
    ) -> keras.Model:
        """Return a model in fp32 in another runtime.

        Parameters
        ----------
        model : keras.Model
            Not changed.
        accelerator : {"openvino", "onnxruntime"}
        input_spec : tf.TensorSpec, or list or dict of them, optional
            The input of a subclass of ``keras.Model``; others tell it themselves.
        thread_num : int, optional
            Threads of the runtime.
        device : str
            Of OpenVINO: ``"CPU"``, ``"GPU"``, ``"GPU.1"``, ``"VPUX"`` or ``"NPU"``.
        onnxruntime_session_options : onnxruntime.SessionOptions, optional
        openvino_config : mapping, optional
            Properties for OpenVINO's ``compile_model``.
        logging : bool
            Accepted; conversions say nothing.
        **kwargs
            Of OpenVINO's conversion (``mean_value``, ``layout``, …), or ``opset`` of ONNX.

        Returns
        -------
        keras.Model

        Raises
        ------
        UsageError
            If the arguments name no method, an argument does not apply to it, the method is not
            possible on this machine, or the model cannot be converted.
        """
        name = _TABLE.traced(accelerator, device, kwargs)
        return _build(find_method(name, "keras"), {**locals()})

    @staticmethod
    def quantize(
        model: keras.Model,
        x: Any = None,
        y: Any = None,
        precision: str = "int8",
        accelerator: str | None = None,
        input_spec: Any = None,
        eval_func: Callable | None = None,
        metric: Any = None,
        accuracy_criterion: Mapping | None = None,
        approach: str = "static",
        method: str | None = None,
        conf: Any = None,
        tuning_strategy: str | None = None,
        timeout: float | None = None,
        max_trials: int | None = None,
        batch: int | None = None,
        thread_num: int | None = None,
        device: str = "CPU",
        custom_objects: Any = None,
        inputs: Any = None,
        outputs: Any = None,
        sample_size: int = 100,
        onnxruntime_session_options: Any = None,
        openvino_config: Mapping | None = None,
        logging: bool = True,
        **kwargs: Any,
    ) -> keras.Model:
        """Return a model in bf16, fp16 or int8.

        Parameters
        ----------
        model : keras.Model
            Not changed.
        x, y : optional
            Data for int8's calibration, and for `metric`: arrays, tensors, lists or dicts of them,
            or a ``tf.data.Dataset`` of pairs. Without data random numbers are taken.
        precision : {"int8", "bf16", "fp16"}
        accelerator, input_spec, thread_num, device
            As of :meth:`trace`. Without accelerator bf16 is Keras' own ``mixed_bfloat16`` and
            int8 runs in OpenVINO.
        eval_func : callable, optional
            Called with a model, returns its score: an alternative to `metric`.
        metric : keras.metrics.Metric or callable, optional
            With it, and with `y`, int8 keeps the accuracy within `accuracy_criterion`, or is
            refused.
        accuracy_criterion : dict, optional
            ``{"relative": 0.01, "higher_is_better": True}`` (the default) or ``"absolute"``.
        approach : {"static"}
        method : str, optional
            A variant: ``"qlinear"``, ``"integer"`` or ``"nncf"`` with ONNX Runtime,
            ``"weight_only"`` or ``"bf16"`` (the rest in bf16) with OpenVINO.
        conf, tuning_strategy, custom_objects, inputs, outputs
            Accepted for programs that were written for Neural Compressor; they change nothing.
        timeout : float, optional
            Seconds after which no further layer selection is tried; 0 sets no limit.
        max_trials : int, optional
            How many quantized models are scored at most.
        batch : int, optional
            Rows of a batch of calibration.
        sample_size : int
            Rows for calibration.
        onnxruntime_session_options, openvino_config, logging, **kwargs
            As of :meth:`trace`.

        Returns
        -------
        keras.Model

        Raises
        ------
        UsageError
            As of :meth:`trace`; also if the accuracy criterion cannot be met.
        """
        name = _TABLE.quantized(precision, accelerator, device, approach, method)
        return _build(find_method(name, "keras"), {**locals()})

    @staticmethod
    def build(model: keras.Model, method: str, **arguments: Any) -> keras.Model:
        """Apply one method of the registry by its name.

        Parameters
        ----------
        model : keras.Model
            Not changed.
        method : str
            A name of the registry, e.g. ``"openvino_int8_bf16"``.
        **arguments
            Those of :meth:`quantize` that apply to the method.

        Returns
        -------
        keras.Model

        Raises
        ------
        UsageError
            As of :meth:`quantize`.
        """
        chosen = find_method(method, "keras")
        conversion = {key: arguments.pop(key) for key in set(arguments) - set(_KEYWORDS.defaults)}
        return _build(chosen, {**arguments, "model": model, "kwargs": conversion})

    def optimize(
        self,
        model: keras.Model,
        x: Any,
        y: Any = None,
        validation_data: Any = None,
        input_spec: Any = None,
        batch_size: int = 1,
        metric: Any = None,
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
        """Try methods on a model: convert it, compare its results, time it, score it.

        Each method is tried in a process of its own, so that one that hangs, crashes or takes too
        much memory costs its row only. It is timed in alternation with ``model(x)``. The table is
        printed at the end; :meth:`summary`, :meth:`results` and :meth:`plot` give it again.

        Parameters
        ----------
        model : keras.Model
            Not changed.
        x, y
            As of :meth:`quantize`; the first rows of `x` are the sample that is timed.
        validation_data : tuple or tf.data.Dataset, optional
            ``(x, y)``, or a dataset of such pairs, for `metric`.
        input_spec : optional
            As of :meth:`trace`.
        batch_size : int
            Rows of the sample.
        metric : keras.metrics.Metric or callable, optional
            A Metric, or a callable with parameters for predictions and targets (names that contain
            "pred", and "target", "true" or "label"), whose results are averaged over the rows; or
            any other callable, called as ``metric(model, validation_data)``, or as
            ``metric(model)`` without validation data.
        direction : {"max", "min"}
            Whether a higher or a lower metric is better.
        thread_num : int, optional
            Threads of every model, the original included.
        logging : bool
            Show what methods print, and a progress bar also where there is no terminal.
        latency_sample_num : int
            Calls that are timed; fewer where they take more than ten seconds.
        includes : list of str, optional
            Try these methods only, and the original.
        excludes : list of str, optional
            Leave these methods out; the original is always tried.
        output_filename : str, optional
            File for the table.
        time_limit : float, optional
            Seconds for one method. By default 20 times what the original took, and at least 300.
        memory_limit : int, optional
            Bytes of resident memory of the process that tries methods; by default 90 % of what is
            free at the beginning.

        Raises
        ------
        UsageError
            If an argument makes no sense, or the original does not run on the data or the metric.
        """
        model = actual(model)
        _check_model(model)
        check_direction(direction)
        names = choose(METHODS, DEFAULT_METHODS, includes=includes, excludes=excludes)
        threads = check_threads(thread_num)
        plan = Plan(
            runs=check_positive("latency_sample_num", latency_sample_num), threads=(threads,)
        )
        bench = KerasBench(
            model,
            {name: METHODS[name] for name in names},
            x,
            y,
            input_spec=input_spec,
            batch_size=check_positive("batch_size", batch_size),
            validation_data=validation_data,
            metric=metric,
            thread_num=threads,
        )
        self._search(
            bench,
            plan,
            direction,
            limits=Limits(time_limit, memory_limit),
            threads=core_count(),
            logging=logging,
            output_filename=output_filename,
            cache=Cache(None),
        )

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
            Only models of this runtime.
        precision : {"fp32", "bf16", "fp16", "int8"}, optional
            Only models of this precision.
        accuracy_criterion : float, optional
            Largest drop of the accuracy, as a fraction of the original's.

        Returns
        -------
        model : keras.Model
        option : str
            What was done, e.g. ``"openvino + int8"`` or ``"original"``.

        Raises
        ------
        UsageError
            If :meth:`optimize` was not called, no model that works is of this kind, or there is a
            criterion and no accuracy.
        """
        return self._best(accelerator, precision, None, accuracy_criterion)

    @staticmethod
    def save(model: keras.Model, path: Any) -> None:
        """Write a model, accelerated or not, to a directory.

        Parameters
        ----------
        model : keras.Model
        path : str or path
            An earlier model there is replaced when the new one is complete.
        """
        save_model(model, path)

    @staticmethod
    def load(
        path: Any,
        model: keras.Model | None = None,
        device: str | None = None,
        custom_objects: Mapping[str, Any] | None = None,
        thread_num: int | None = None,
    ) -> keras.Model:
        """Read a model from a directory that :meth:`save` wrote.

        Parameters
        ----------
        path : str, path, or dict of str to binary file
            The directory, or its files by name.
        model : keras.Model, optional
            The original: its attributes are found on the model again, and it is compiled alike.
        device : str, optional
            OpenVINO's device, instead of the saved one.
        custom_objects : mapping, optional
            Classes and functions by name that Keras does not know.
        thread_num : int, optional
            Threads of the model, instead of those that it was saved with.

        Returns
        -------
        keras.Model

        Raises
        ------
        UsageError
            If a file is missing, or it holds something else.
        """
        return load_model(path, model, device, custom_objects, check_threads(thread_num))

    def _original(self, trial: Trial) -> keras.Model:
        return self._bench.model

    def _read(self, directory: Path) -> keras.Model:
        return load_model(directory, self._bench.model)


_KEYWORDS = Keywords(
    InferenceOptimizer.trace,
    InferenceOptimizer.quantize,
    # programs pass their data and its batch size whatever the precision is
    always=(
        *("input_spec", "x", "y", "batch", "sample_size"),
        *("custom_objects", "inputs", "outputs"),
    ),
)


def _build(method: Method, arguments: Mapping[str, Any]) -> keras.Model:
    """Apply a method to ``arguments["model"]``; the other arguments are those of ``quantize``."""
    model = actual(arguments["model"])
    _check_model(model)
    method.require()
    values = _KEYWORDS.checked(method, arguments)
    source = KerasSource(model, values["input_spec"], values["x"], values["y"], values["batch"])
    goal = accuracy_goal(values, source)
    built = method.build(source, options_of(method, values, arguments.get("kwargs"), goal))
    if isinstance(built, AcceleratedKerasModel):
        method.try_out(lambda: built(*source.inputs.pack(source.sample_arrays())))
    return built


def _check_model(model: Any) -> None:
    """Refuse what is no Keras model, or not an original one."""
    if not isinstance(model, keras.Model):
        raise UsageError(f"model should be a Keras Model. A {type(model).__name__} was given.")
    if isinstance(model, AcceleratedKerasModel):
        raise UsageError(
            "Expect a Keras Model that is not traced or quantized but got type "
            f"{type(model).__name__}; pass the original model"
        )
