"""The user's own training loop in this process or in several; below TorchNano and nano."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins import Precision
from lightning_fabric.strategies import DDPStrategy, SingleDeviceStrategy
from lightning_fabric.utilities.rank_zero import rank_zero_info
from lightning_fabric.utilities.seed import _collect_rng_states, _set_rng_states
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.training.arguments import check_bucket
from bigdl.nano.pytorch.training.group import LocalGroup
from bigdl.nano.pytorch.training.optimizers import LearningRateRamp
from bigdl.nano.pytorch.training.processes import BACKENDS, Processes
from bigdl.nano.pytorch.training.settings import FastSteps, Wishes
from bigdl.nano.pytorch.training.travel import Belongings, Changes

__all__ = ["LoopSettings", "Parts", "run_loop"]

_IN_PLACE = (nn.Module, torch.optim.Optimizer)


@dataclass(frozen=True)
class LoopSettings:
    """What the arguments of a TorchNano ask for."""

    processes: Processes
    wishes: Wishes
    auto_lr: bool
    bucket_cap_mb: float
    fabric: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        num_processes: int | None,
        use_ipex: bool,
        distributed_backend: str,
        process_group_backend: str | None,
        precision: Any,
        cpu_for_each_process: Sequence[Sequence[int]] | None,
        channels_last: bool | None,
        auto_lr: bool,
        fabric: Mapping[str, Any],
        *,
        fused_optimizers: bool = True,
        tune_process: bool = True,
        inductor: bool = False,
        bucket_cap_mb: float = 25.0,
    ) -> LoopSettings:
        """Check arguments, under the names that users know.

        Raises
        ------
        UsageError
        """
        if not isinstance(auto_lr, bool):
            raise UsageError(f"auto_lr must be True or False, not {auto_lr!r}")
        fabric = dict(fabric)
        if distributed_backend not in (*BACKENDS, "k8s"):
            warnings.warn(
                f"distributed_backend={distributed_backend!r} is none of Nano's and is passed on "
                "to Lightning Fabric as its strategy",
                stacklevel=4,
            )
            fabric.setdefault("strategy", distributed_backend)
            fabric.setdefault("devices", num_processes or 1)
            num_processes, distributed_backend = None, "subprocess"
        processes = Processes.of(
            num_processes,
            distributed_backend,
            process_group_backend,
            cpu_for_each_process,
            tune_process,
        )
        wishes = Wishes.of(precision, channels_last, fused_optimizers, use_ipex, inductor)
        check_bucket(bucket_cap_mb)
        if processes.count > 1:
            extra = [name for name in ("strategy", "devices", "num_nodes") if name in fabric]
            if extra:
                raise UsageError(
                    f"num_processes={processes.count} brings a strategy of its own, which "
                    f"{' and '.join(extra)} contradicts; leave one of them out"
                )
        return cls(processes, wishes, auto_lr, bucket_cap_mb, fabric)


class Parts:
    """What a loop works with, in one process.

    Parameters
    ----------
    settings : LoopSettings
    rank : int

    Attributes
    ----------
    fabric : Fabric
    report : list of str
        What models were set up with.
    """

    def __init__(self, settings: LoopSettings, rank: int = 0, said: Sequence[str] = ()):
        self._settings, self._said = settings, said
        self._steps: list[FastSteps] = []
        self.report: list[str] = []
        self.fabric = Fabric(**_fabric_arguments(settings, rank))
        self.fabric._launched = True
        self.fabric.strategy.setup_environment()

    def model(
        self, model: nn.Module, optimizers: list[torch.optim.Optimizer], move_to_device: bool
    ) -> tuple[nn.Module, list[Any]]:
        """Prepare a model and its optimizers."""
        steps = FastSteps(self._settings.wishes, model, calls=True)
        self._steps.append(steps)
        steps.optimizers(optimizers)
        count = self.fabric.world_size
        if self._settings.auto_lr and count > 1:
            for optimizer in optimizers:
                LearningRateRamp(optimizer, count)
            steps.report.append(f"learning rates × {count} after 1000 steps")
        prepared = self.fabric.setup(model, *optimizers, move_to_device=move_to_device)
        model, *optimizers = prepared if optimizers else (prepared,)
        self._say(steps)
        return model, optimizers

    def loaders(
        self, loaders: Sequence[DataLoader], replace_sampler: bool, move_to_device: bool
    ) -> Any:
        """Prepare loaders."""
        return self.fabric.setup_dataloaders(
            *loaders, use_distributed_sampler=replace_sampler, move_to_device=move_to_device
        )

    def close(self) -> None:
        """Leave models as they were."""
        for steps in self._steps:
            steps.undo()

    def _say(self, steps: FastSteps) -> None:
        processes, count = self._settings.processes, self.fabric.world_size
        if processes.count > 1:
            told = processes.told(self._settings.bucket_cap_mb)
        else:
            several = f"{count} processes × " if count > 1 else ""  # of a strategy of Fabric's
            told = [*self._said, f"{several}{torch.get_num_threads()} threads"]
        self.report = [*steps.report, *told]
        rank_zero_info(f"Nano trains with {', '.join(self.report)}")


def run_loop(settings: LoopSettings, loop: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """Call ``loop(parts, args, kwargs)`` in each process.

    Modules and optimizers among the arguments are afterwards as the first process left them, and
    so are modules and attributes of ``loop.owner``.

    Returns
    -------
    object
        What the first process returned.
    """
    if settings.processes.count == 1:
        with settings.processes.tuned_here() as said:
            return _run(Parts(settings, said=said), loop, args, kwargs)
    belongings = _belongings(loop, args, kwargs)
    random = _collect_rng_states(include_cuda=False)
    order = (settings, loop, args, kwargs, random)
    home = belongings.loads(settings.processes.run(_run_in_worker, *order)[0])
    Changes.apply(belongings, home["changes"])
    for name, state in home["optimizers"].items():
        vars(belongings.roots[name]).update(state)
    _set_rng_states(home["random"])
    return home["result"]


def _run_in_worker(
    rank: int, settings: LoopSettings, loop: Callable[..., Any], args: tuple, kwargs: dict, random
) -> bytes | None:
    _set_rng_states(random)
    belongings = _belongings(loop, args, kwargs)
    owner = {} if loop.owner is None else {"owner": loop.owner}
    changes = Changes(belongings, owner, ("train", "_parts", "_settings"))
    result = _run(Parts(settings, rank), loop, args, kwargs)
    if rank:
        return None
    optimizers = {
        name: root.__getstate__()
        for name, root in belongings.roots.items()
        if isinstance(root, torch.optim.Optimizer)
    }
    home = {"changes": changes.collect(), "optimizers": optimizers, "result": result}
    home["random"] = _collect_rng_states(include_cuda=False)
    try:
        return belongings.dumps(home)
    except Exception as error:
        raise UsageError(
            f"What train returned, a {type(result).__name__}, cannot be brought back from its "
            f"process: {error}"
        ) from error


def _run(parts: Parts, loop: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    try:
        return loop(parts, args, kwargs)
    finally:
        parts.close()


def _belongings(loop: Callable[..., Any], args: tuple, kwargs: dict) -> Belongings:
    values = {**dict(enumerate(args)), **kwargs}
    roots = {f"argument {name}": each for name, each in values.items()}
    if loop.owner is not None:
        own = {f"attribute {name}": each for name, each in vars(loop.owner).items()}
        roots = {"owner": loop.owner, **roots, **own}
    return Belongings(
        {name: each for name, each in roots.items() if name == "owner" or _is_trained(each)},
        _unwrapped,
    )


def _is_trained(value: Any) -> bool:
    return isinstance(value, _IN_PLACE)


def _unwrapped(value: Any) -> Any:
    """The user's own object in the place of Fabric's wrapper."""
    from lightning_fabric.wrappers import _FabricModule, _FabricOptimizer

    if isinstance(value, _FabricModule):
        return value.module
    return value.optimizer if isinstance(value, _FabricOptimizer) else value


def _fabric_arguments(settings: LoopSettings, rank: int) -> dict[str, Any]:
    arguments = dict(settings.fabric)
    if "plugins" not in arguments:
        precision = settings.wishes.precision
        if precision in ("bf16-mixed", "16-mixed"):
            arguments["plugins"] = [_Bf16()]
        elif precision is not None:
            arguments["precision"] = precision
    if settings.processes.count > 1:
        group = LocalGroup()
        group.join(rank, settings.processes.count)
        strategy = _Processes(settings.processes, group, settings.bucket_cap_mb)
        arguments |= {"accelerator": "cpu", "strategy": strategy}
    else:
        arguments.setdefault("accelerator", "cpu")
        arguments.setdefault("devices", 1)
        if arguments["accelerator"] == "cpu" and arguments["devices"] == 1:
            arguments.setdefault("strategy", SingleDeviceStrategy(torch.device("cpu")))
    return arguments


class _Bf16(Precision):
    """bfloat16 wherever PyTorch's autocast uses it; a plain ``loss.backward()`` stays possible."""

    precision = "bf16-mixed"

    def forward_context(self) -> Any:
        return torch.autocast("cpu", torch.bfloat16)

    def convert_output(self, data: Any) -> Any:
        return tree_map_only(torch.Tensor, _full, data)


def _full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


class _Processes(DDPStrategy):
    """Fabric in one of the processes that have met already."""

    def __init__(self, processes: Processes, group: LocalGroup, bucket_cap_mb: float):
        super().__init__(
            parallel_devices=[torch.device("cpu")] * processes.count,
            cluster_environment=group,
            process_group_backend="gloo",
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_cap_mb,
        )

    def _configure_launcher(self) -> None:
        self._launcher = None

    def _set_world_ranks(self) -> None:
        """Nothing: the group knows its ranks."""

    def _setup_distributed(self) -> None:
        """Nothing: the processes have met already."""
