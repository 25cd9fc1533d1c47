"""Training options: processes, steps, and checks of the arguments of Lightning's Trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from bigdl.common.checks import check_choice, check_number, check_positive
from bigdl.common.errors import UsageError, require
from bigdl.common.memory import glibc_tunables
from bigdl.nano.runtime import tuned_fit
from bigdl.runtime.process import cpu_slots

BACKENDS = ("subprocess", "spawn", "fork", "ray")

_PRECISIONS: dict[Any, str | None] = {
    **dict.fromkeys((None,), None),
    **dict.fromkeys((64, "64", "64-true"), "64-true"),
    **dict.fromkeys((32, "32", "32-true"), "32-true"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bf16-mixed"),
    # CPUs have no fp16 arithmetic: Lightning uses bfloat16 instead.
    **dict.fromkeys((16, "16", "16-mixed"), "16-mixed"),
    "bf16-true": "bf16-true",
    "16-true": "16-true",
}
_log = logging.getLogger(__name__)


def check_bool(name: str, value: object) -> bool:
    """Return `value` if it is a bool, else raise UsageError."""
    if not isinstance(value, bool):
        raise UsageError(
            f"{name} must be True or False, not {value!r}", code="argument-type", argument=name
        )
    return value


@dataclass
class TrainingOptions:
    """Training arguments that Nano adds to Lightning's, under their public names.

    Attributes
    ----------
    num_processes : int
        Number of training processes; 1 trains in the calling process.
    distributed_backend : {"subprocess", "spawn", "fork", "ray"}
    process_group_backend : {None, "gloo"}
    cpu_for_each_process : sequence of sequence of int, optional
        Logical cores of each process.
    tune_process : bool
        Whether to tune the memory allocator and, in a single process, the number of threads.
    precision : str or None
        Lightning's name of a precision. None trains in float32, or in bfloat16 if measured faster.
    channels_last : bool or None
        Whether images are stored with channels last; None selects the faster by measurement.
    fused_optimizers : bool
        Whether to use the fused implementation of optimizers that have one.
    use_ipex : bool
        No effect; accepted for compatibility with BigDL 2.x.
    inductor : bool or "auto"
        Whether TorchInductor compiles the layers; ``"auto"`` decides by timing steps of the fit.
    bucket_cap_mb : float
        Megabytes of gradients that are all-reduced together.
    frozen_prefix : bool or None
        Whether to accelerate frozen layers; None does so if the remaining steps repay the cost.

    Raises
    ------
    UsageError
        If an argument is invalid.
    """

    num_processes: int | None = None
    distributed_backend: str = "subprocess"
    process_group_backend: str | None = None
    cpu_for_each_process: Sequence[Sequence[int]] | None = None
    tune_process: bool = True
    precision: Any = None
    channels_last: bool | None = None
    fused_optimizers: bool = True
    use_ipex: bool = False
    inductor: bool | str = False
    bucket_cap_mb: float = 25.0
    frozen_prefix: bool | None = None

    def __post_init__(self) -> None:
        self.count = check_positive(
            "num_processes", 1 if self.num_processes is None else self.num_processes
        )
        if self.distributed_backend == "k8s":
            raise UsageError(
                "distributed_backend='k8s' has no launcher any more; start the program "
                "by a PyTorchJob or torchrun with Lightning's strategy='ddp' instead",
                code="name-dropped",
                argument="distributed_backend",
            )
        check_choice("distributed_backend", self.distributed_backend, BACKENDS)
        if self.distributed_backend == "ray":
            require("ray", "ray")
        if self.process_group_backend not in (None, "gloo"):
            raise UsageError(
                "process_group_backend must be None or 'gloo', not "
                f"{self.process_group_backend!r}: oneCCL's bindings for PyTorch are discontinued",
                code="argument-value",
                argument="process_group_backend",
                allowed=[None, "gloo"],
            )
        try:
            cpu_slots(self.count, self.cpu_for_each_process)
        except (UsageError, TypeError) as error:
            raise UsageError(
                f"cpu_for_each_process={self.cpu_for_each_process!r} must name the cores of each "
                f"of {self.count} processes (num_processes): a list of core numbers for each "
                "process, at least one core for each process, among the cores that this process "
                f"may use: {error}",
                code="argument-value",
                argument="cpu_for_each_process",
            ) from None
        if not isinstance(self.precision, int | str | None) or self.precision not in _PRECISIONS:
            raise UsageError(
                "precision must be None, 64, 32, 16, 'bf16' or a precision of Lightning such as "
                f"'bf16-mixed', not {self.precision!r}",
                code="argument-value",
                argument="precision",
            )
        self.precision = _PRECISIONS[self.precision]
        for name in ("tune_process", "use_ipex", "fused_optimizers"):
            check_bool(name, getattr(self, name))
        if self.inductor != "auto" and not isinstance(self.inductor, bool):
            raise UsageError(
                f"inductor must be True, False or 'auto', not {self.inductor!r}",
                code="argument-value",
                argument="inductor",
                allowed=[True, False, "auto"],
            )
        check_choice("channels_last", self.channels_last, (True, False, None))
        check_choice("frozen_prefix", self.frozen_prefix, (True, False, None))
        check_number("bucket_cap_mb", self.bucket_cap_mb, above=0)
        if self.use_ipex:
            _log.warning(
                "IPEX is discontinued and PyTorch has its optimizations: use_ipex=True selects the "
                "automatic settings, which are the default"
            )

    def tuning_context(self) -> AbstractContextManager[list[str]]:
        """Return a context manager that tunes this process and yields a list of its settings."""
        cores = self.cpu_for_each_process
        return tuned_fit(tuned=self.tune_process, cores=cores[0] if cores else None)

    def describe_processes(self) -> list[str]:
        """Return short descriptions of the settings for several processes."""
        allocator = ["tuned allocator"] if self.tune_process and glibc_tunables() else []
        threads = f"{self.count} processes × {torch.get_num_threads()} threads"
        return [*allocator, threads, f"gradients by {self.bucket_cap_mb:g} MB"]


# Arguments of Lightning 1.6 with their current name and the conversion of the value.
_RENAMED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "checkpoint_callback": ("enable_checkpointing", lambda value: value),
    "progress_bar_refresh_rate": ("enable_progress_bar", lambda value: value != 0),
    "replace_sampler_ddp": ("use_distributed_sampler", lambda value: value),
    "weights_summary": ("enable_model_summary", lambda value: value is not None),
}
# Removed arguments of Lightning 1.6 with their replacement.
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


def translate_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Convert Trainer arguments of Lightning 1.6 to their current names and values.

    Parameters
    ----------
    arguments : dict
        Keywords for ``pytorch_lightning.Trainer``, possibly of version 1.6.

    Raises
    ------
    UsageError
        If an argument no longer exists.
    """
    today = {}
    for name, value in arguments.items():
        if name in _RENAMED:
            new_name, translate = _RENAMED[name]
            today[new_name] = translate(value)
        elif name in ("gpus", "tpu_cores", "resume_from_checkpoint") and not value:
            continue
        elif name in _ADVICE:
            raise UsageError(
                f"Trainer has no argument {name!r} any more: {_ADVICE[name]}",
                code="name-dropped",
                argument=name,
            )
        else:
            today[name] = value
    return today


def check_lightning_arguments(arguments: dict[str, Any], num_processes: int) -> None:
    """Raise UsageError if an argument contradicts training in several processes.

    Raises
    ------
    UsageError
    """
    if num_processes == 1:
        return
    if arguments.get("accelerator", "auto") not in ("auto", "cpu"):
        raise UsageError(
            f"num_processes={num_processes} trains on the CPU, which accelerator="
            f"{arguments['accelerator']!r} contradicts; leave one of them out",
            code="argument-conflict",
            argument="accelerator",
        )
    for name, neutral in (("strategy", "auto"), ("devices", "auto"), ("num_nodes", 1)):
        if arguments.get(name, neutral) != neutral:
            raise UsageError(
                f"num_processes={num_processes} brings its own strategy, which {name}="
                f"{arguments[name]!r} contradicts; leave one of them out",
                code="argument-conflict",
                argument=name,
            )


def precision_of_plugin(plugins: object) -> str | None:
    """Return the precision of the first precision plugin, or None."""
    from pytorch_lightning.plugins import Precision

    plugins = plugins if isinstance(plugins, (list, tuple)) else [plugins]
    return next((str(each.precision) for each in plugins if isinstance(each, Precision)), None)
