"""From the keywords of ``trace``, ``quantize`` and ``build`` to an accelerated Keras model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from bigdl.common.errors import UsageError
from bigdl.common.stand_ins import actual
from bigdl.nano.acceleration import (
    BuildOptions,
    Calibration,
    Method,
    OnnxOptions,
    OpenVINOOptions,
)
from bigdl.nano.acceleration.arguments import refuse_inapplicable, thread_count
from bigdl.nano.tf.inference.accelerated import AcceleratedKerasModel
from bigdl.nano.tf.inference.goals import accuracy_goal
from bigdl.nano.tf.inference.source import KerasSource

__all__ = ["DEFAULTS", "build", "check_model"]

DEFAULTS: dict[str, Any] = {
    "input_spec": None,
    "thread_num": None,
    "device": "CPU",
    "onnxruntime_session_options": None,
    "openvino_config": None,
    "x": None,
    "y": None,
    "eval_func": None,
    "metric": None,
    "accuracy_criterion": None,
    "timeout": None,
    "max_trials": None,
    "batch": None,
    "sample_size": 100,
}
# Programs pass their data and its batch size whatever the precision is.
_APPLIES_TO_ALL = {"input_spec", "thread_num", "x", "y", "batch", "sample_size"}
_INT8 = {"eval_func", "metric", "accuracy_criterion", "timeout", "max_trials"}
_OPENVINO = {"device", "openvino_config"}
_ONNXRUNTIME = {"onnxruntime_session_options"}


def build(
    method: Method, model: Any, arguments: Mapping[str, Any], rest: Mapping[str, Any]
) -> keras.Model:
    """Apply a method to a model.

    Parameters
    ----------
    method : Method
    model : keras.Model
    arguments : mapping
        Keywords of ``quantize``.
    rest : mapping
        Keywords of the conversion.

    Raises
    ------
    UsageError
        If an argument does not apply to the method, the method is not possible on this machine, or
        the model cannot be converted.
    """
    model = actual(model)
    check_model(model)
    method.require()
    _refuse_inapplicable(method, arguments, rest)
    given = {**DEFAULTS, **arguments}
    source = KerasSource(model, given["input_spec"], given["x"], given["y"], given["batch"])
    built = method.build(source, _options(method, given, rest, source))
    if isinstance(built, AcceleratedKerasModel):
        method.try_out(lambda: built(*source.inputs.pack(source.sample_arrays())))
    return built


def _options(
    method: Method, given: Mapping[str, Any], rest: Mapping[str, Any], source: KerasSource
) -> BuildOptions:
    goal = accuracy_goal(
        given["metric"],
        given["eval_func"],
        (given["x"], given["y"]),
        lambda: source.inputs,
        given["accuracy_criterion"],
        given["max_trials"],
        given["timeout"],
    )
    in_onnx = method.accelerator == "onnxruntime"
    return BuildOptions(
        threads=thread_count(given["thread_num"]),
        onnx=OnnxOptions(given["onnxruntime_session_options"], True, rest if in_onnx else {}),
        openvino=OpenVINOOptions(
            given["device"], dict(given["openvino_config"] or {}), {} if in_onnx else rest
        ),
        calibration=Calibration(sample_size=given["sample_size"], goal=goal),
    )


def _refuse_inapplicable(
    method: Method, arguments: Mapping[str, Any], rest: Mapping[str, Any]
) -> None:
    applies = set(_APPLIES_TO_ALL)
    if method.precision == "int8":
        applies |= _INT8
    if method.accelerator == "openvino" or method.name == "static_int8":
        applies |= _OPENVINO
    if method.accelerator == "onnxruntime":
        applies |= _ONNXRUNTIME
    given = {
        name: (value, DEFAULTS[name]) for name, value in arguments.items() if name not in applies
    }
    if method.name in ("original", "bf16"):
        given |= {name: (value, None) for name, value in rest.items()}
    refuse_inapplicable(method.name, given)


def check_model(model: Any) -> None:
    """Refuse what is no Keras model, or not an original one."""
    if not isinstance(model, keras.Model):
        raise UsageError(f"model should be a Keras Model. A {type(model).__name__} was given.")
    if isinstance(model, AcceleratedKerasModel):
        raise UsageError(
            "Expect a Keras Model that is not traced or quantized but got type "
            f"{type(model).__name__}; pass the original model"
        )
