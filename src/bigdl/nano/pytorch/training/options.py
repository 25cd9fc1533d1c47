"""Options of a training: how steps are made faster, and the arguments of Lightning's Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bigdl.common.checks import check_choice, check_number
from bigdl.common.errors import UsageError

_PRECISIONS: dict[Any, str | None] = {
    **dict.fromkeys((None,), None),
    **dict.fromkeys((64, "64", "64-true"), "64-true"),
    **dict.fromkeys((32, "32", "32-true"), "32-true"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16-mixed"),
    # Processors have no fp16 of their own: where Lightning runs, it takes bfloat16 for it.
    **dict.fromkeys((16, "16", "16-mixed"), "16-mixed"),
    "bf16-true": "bf16-true",
    "16-true": "16-true",
}
_log = logging.getLogger(__name__)


def check_bool(name: str, value: Any) -> bool:
    """Return `value`, or refuse what is neither True nor False."""
    if not isinstance(value, bool):
        raise UsageError(f"{name} must be True or False, not {value!r}")
    return value


@dataclass(frozen=True)
class TrainingOptions:
    """Options that make the steps of a training faster.

    Attributes
    ----------
    precision : str or None
        Lightning's name; None is bfloat16 in training where the processor has it and it pays.
    channels_last : bool or None
        None is where the model has convolutions in two dimensions.
    fused_optimizers : bool
        Whether optimizers that have a fused implementation use it.
    inductor : bool
        Whether TorchInductor compiles the layers.
    bucket_cap_mb : float
        Megabytes of gradients that travel together between processes.
    """

    precision: str | None = None
    channels_last: bool | None = None
    fused_optimizers: bool = True
    inductor: bool = False
    bucket_cap_mb: float = 25.0

    @classmethod
    def of(
        cls,
        precision: Any,
        channels_last: bool | None,
        fused_optimizers: bool,
        use_ipex: bool,
        inductor: bool,
        bucket_cap_mb: float,
    ) -> TrainingOptions:
        """Check arguments as users give them.

        Raises
        ------
        UsageError
            If one is wrong.
        """
        if not isinstance(precision, (int, str, type(None))) or precision not in _PRECISIONS:
            raise UsageError(
                "precision must be None, 64, 32, 16, 'bf16' or a name of Lightning's such as "
                f"'bf16-mixed', not {precision!r}"
            )
        check_bool("use_ipex", use_ipex)
        check_bool("fused_optimizers", fused_optimizers)
        check_bool("inductor", inductor)
        check_choice("channels_last", channels_last, (True, False, None))
        check_number("bucket_cap_mb", bucket_cap_mb, above=0)
        if use_ipex:
            _log.warning(
                "IPEX is discontinued and PyTorch has its optimizations: use_ipex=True means the "
                "automatic settings, which are the default"
            )
        lightning_precision = _PRECISIONS[precision]
        return cls(lightning_precision, channels_last, fused_optimizers, inductor, bucket_cap_mb)


# Names that Lightning 1.6 had, with today's name and value.
_RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "checkpoint_callback": ("enable_checkpointing", lambda value: value),
    "progress_bar_refresh_rate": ("enable_progress_bar", lambda value: value != 0),
    "replace_sampler_ddp": ("use_distributed_sampler", lambda value: value),
    "weights_summary": ("enable_model_summary", lambda value: value is not None),
}
# Names that Lightning 1.6 had, with what says the same today.
_ADVICE = {
    "resume_from_checkpoint": "pass ckpt_path to fit",
    "auto_select_gpus": "use devices",
    "gpus": "use accelerator and devices",
    "tpu_cores": "use accelerator and devices",
    "auto_lr_find": "use lightning's Tuner",
    "auto_scale_batch_size": "use lightning's Tuner",
    "stochastic_weight_avg": "pass the callback StochasticWeightAveraging",
    "track_grad_norm": "log the norms in on_before_optimizer_step",
    "amp_backend": "use precision",
    "amp_level": "use precision",
    "terminate_on_nan": "use detect_anomaly",
}


def translated(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments under today's names.

    Parameters
    ----------
    arguments : dict
        Keywords for ``pytorch_lightning.Trainer``, some of which may be of version 1.6.

    Raises
    ------
    UsageError
        If there is no such argument any more.
    """
    today = {}
    for name, value in arguments.items():
        if name in _RENAMED:
            new_name, translate = _RENAMED[name]
            today[new_name] = translate(value)
        elif name in ("gpus", "tpu_cores", "resume_from_checkpoint") and not value:
            continue
        elif name in _ADVICE:
            raise UsageError(f"Trainer has no argument {name!r} any more: {_ADVICE[name]}")
        else:
            today[name] = value
    return today


def check_lightning_arguments(arguments: dict[str, Any], num_processes: int) -> None:
    """Refuse what contradicts several processes.

    Raises
    ------
    UsageError
    """
    if num_processes == 1:
        return
    if arguments.get("accelerator", "auto") not in ("auto", "cpu"):
        raise UsageError(
            f"num_processes={num_processes} trains on the CPU, which accelerator="
            f"{arguments['accelerator']!r} contradicts; leave one of them out"
        )
    for name, neutral in (("strategy", "auto"), ("devices", "auto"), ("num_nodes", 1)):
        if arguments.get(name, neutral) != neutral:
            raise UsageError(
                f"num_processes={num_processes} brings a strategy of its own, which {name}="
                f"{arguments[name]!r} contradicts; leave one of them out"
            )


def check_algorithms(algorithms: Any) -> None:
    """Refuse what is no list of callbacks."""
    from pytorch_lightning import Callback

    is_list = isinstance(algorithms, (list, tuple))
    if not is_list or not all(isinstance(each, Callback) for each in algorithms):
        raise UsageError(
            "algorithms must be a list of callbacks such as [SelectiveBackprop()], not "
            f"{algorithms!r}"
        )


def precision_of_plugin(plugins: Any) -> str | None:
    """Return the precision that a plugin of the user's sees to, if there is one."""
    from pytorch_lightning.plugins import Precision

    plugins = plugins if isinstance(plugins, (list, tuple)) else [plugins]
    return next((str(each.precision) for each in plugins if isinstance(each, Precision)), None)
