"""From the keywords of ``trace``, ``quantize`` and ``build`` to an accelerated model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration import (
    AccuracyGoal,
    BuildOptions,
    Calibration,
    JitOptions,
    Method,
    OnnxOptions,
    OpenVINOOptions,
)
from bigdl.nano.acceleration.arguments import thread_count
from bigdl.nano.pytorch.inference import routes
from bigdl.nano.pytorch.inference.accelerated import AcceleratedModel
from bigdl.nano.pytorch.inference.context import context_of
from bigdl.nano.pytorch.inference.goals import accuracy_goal
from bigdl.nano.pytorch.inference.source import TorchSource

__all__ = ["APPLIES_TO_ALL", "DEFAULTS", "build", "refuse_accelerated"]

DEFAULTS: dict[str, Any] = {
    "input_sample": None,
    "thread_num": None,
    "device": "CPU",
    "onnxruntime_session_options": None,
    "openvino_config": None,
    "simplification": True,
    "jit_strict": True,
    "jit_method": None,
    "dynamic_axes": True,
    "logging": True,
    "inplace": False,
    "weights_prepack": None,
    "enable_onednn": False,
    "output_tensors": True,
    "strict_check": True,
    "example_kwarg_inputs": None,
    "calib_data": None,
    "eval_func": None,
    "metric": None,
    "accuracy_criterion": None,
    "timeout": None,
    "max_trials": None,
    "sample_size": 100,
    "conf": None,
    "tuning_strategy": None,
    "q_config": None,
    "streams": None,
    "smooth": None,
}
APPLIES_TO_ALL = {"input_sample", "thread_num", "logging", "strict_check", "example_kwarg_inputs"}
_ACCEPTED = {"conf", "tuning_strategy", "q_config", "weights_prepack", "enable_onednn"}
_CONVERTED = {"dynamic_axes", "output_tensors"}
_INT8 = {
    "calib_data",
    "eval_func",
    "metric",
    "accuracy_criterion",
    "timeout",
    "max_trials",
    "sample_size",
    "smooth",
}
_APPLIES_TO = {
    "openvino": {"device", "openvino_config", "streams", *_CONVERTED},
    "onnxruntime": {"onnxruntime_session_options", "simplification", *_CONVERTED},
    "jit": {"jit_strict", "jit_method", "inplace"},
    None: {"inplace"},
}


def build(method: Method, arguments: Mapping[str, Any]) -> torch.nn.Module:
    """Apply a method to a model.

    Parameters
    ----------
    method : Method
    arguments : mapping
        ``model``, keywords of ``quantize``, and as ``kwargs`` those of the conversion.

    Raises
    ------
    UsageError
        If an argument does not apply to the method, the method is not possible on this machine, or
        the model cannot be converted.
    """
    method.require()
    _refuse_inapplicable(method, arguments)
    given = {**DEFAULTS, **{k: v for k, v in arguments.items() if k in DEFAULTS}}
    model = arguments["model"]
    source = TorchSource(
        model, given["input_sample"], given["example_kwarg_inputs"], given["calib_data"]
    )
    if source.has_sample and method.name != "original":
        source.outputs  # noqa: B018 - says what is wrong with a sample before a runtime does
    built = method.build(source, _options(method, given, arguments.get("kwargs") or {}))
    if given["strict_check"] and source.has_sample and isinstance(built, AcceleratedModel):
        args, kwargs = source.arguments
        with context_of(built):
            method.try_out(lambda: built(*args, **kwargs))
    return built


def _options(method: Method, given: Mapping[str, Any], rest: Mapping) -> BuildOptions:
    """The keywords of ``quantize``, sorted."""
    goal: AccuracyGoal | None = accuracy_goal(
        given["metric"],
        given["eval_func"],
        given["calib_data"],
        given["accuracy_criterion"],
        given["max_trials"],
        given["timeout"],
    )
    return BuildOptions(
        threads=thread_count(given["thread_num"]),
        streams=given["streams"],
        dynamic_axes=given["dynamic_axes"],
        output_tensors=given["output_tensors"],
        inplace=given["inplace"],
        onnx=OnnxOptions(
            given["onnxruntime_session_options"],
            given["simplification"],
            dict(rest) if method.accelerator == "onnxruntime" else {},
        ),
        openvino=OpenVINOOptions(
            given["device"],
            dict(given["openvino_config"] or {}),
            dict(rest) if method.accelerator == "openvino" else {},
        ),
        jit=JitOptions(given["jit_method"], given["jit_strict"]),
        calibration=Calibration(
            data=given["calib_data"],
            sample_size=given["sample_size"],
            smooth=given["smooth"],
            goal=goal,
        ),
    )


def _refuse_inapplicable(method: Method, arguments: Mapping[str, Any]) -> None:
    applies = APPLIES_TO_ALL | _ACCEPTED | _APPLIES_TO[method.accelerator] | {*method.arguments}
    if method.precision == "int8":
        applies |= _INT8
    routes.refuse_inapplicable(
        method.name,
        {
            name: (arguments[name], default)
            for name, default in DEFAULTS.items()
            if name in arguments and name not in applies
        },
    )
    if arguments.get("channels_last") and not method.channels_last:
        routes.refuse_inapplicable(method.name, {"channels_last": (True, False)})
    if arguments.get("use_ipex") and not method.ipex:
        routes.refuse_inapplicable(method.name, {"use_ipex": (True, False)})
    rest = arguments.get("kwargs") or {}
    if rest and method.accelerator not in ("openvino", "onnxruntime"):
        routes.refuse_inapplicable(method.name, {key: (v, None) for key, v in rest.items()})


def refuse_accelerated(model: Any, done: str) -> None:
    """Refuse what is no module, or not an original one."""
    if not isinstance(model, torch.nn.Module):
        raise UsageError(f"model should be a nn module, but a {type(model).__name__} was given")
    if isinstance(model, AcceleratedModel):
        raise UsageError(
            f"Expect a nn.Module instance that is not {done} but got type {type(model)}; pass the "
            "original model"
        )
