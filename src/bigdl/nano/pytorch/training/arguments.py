"""Arguments of Lightning's Trainer and of ours: old names, wrong values and conflicts."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError

__all__ = [
    "check_algorithms",
    "check_bucket",
    "check_lightning_arguments",
    "precision_of_plugin",
    "translated",
]

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
    """Arguments under today's names.

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
        if name == "checkpoint_callback":
            today["enable_checkpointing"] = value
        elif name == "progress_bar_refresh_rate":
            today["enable_progress_bar"] = value != 0
        elif name == "weights_summary":
            today["enable_model_summary"] = value is not None
        elif name == "replace_sampler_ddp":
            today["use_distributed_sampler"] = value
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


def check_bucket(megabytes: Any) -> None:
    """Refuse what is no size of a bucket of gradients."""
    is_number = isinstance(megabytes, (int, float)) and not isinstance(megabytes, bool)
    if not is_number or not 0 < megabytes < float("inf"):
        raise UsageError(f"bucket_cap_mb must be a positive number of MB, not {megabytes!r}")


def check_algorithms(algorithms: Any) -> None:
    """Refuse what is no list of callbacks."""
    from pytorch_lightning import Callback

    given = algorithms if isinstance(algorithms, (list, tuple)) else [algorithms]
    wrong = [each for each in given if not isinstance(each, Callback)]
    if given is not algorithms or wrong:
        raise UsageError(
            "algorithms must be a list of callbacks such as [SelectiveBackprop()], not "
            f"{algorithms!r}"
        )


def precision_of_plugin(plugins: Any) -> str | None:
    """The precision that a plugin of the user's sees to, if there is one."""
    from pytorch_lightning.plugins import Precision

    given = plugins if isinstance(plugins, (list, tuple)) else [plugins]
    return next((str(each.precision) for each in given if isinstance(each, Precision)), None)
