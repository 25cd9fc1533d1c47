"""How Lightning's Trainer runs with Nano's settings: in this process, or in several.

A strategy of Lightning says where the model lies and how gradients meet; the launcher that belongs
to it says in which processes the fit runs. Both strategies apply the same settings
(:class:`FastSteps`) between the set-up of a fit and its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from pytorch_lightning.strategies import DDPStrategy, SingleDeviceStrategy
from pytorch_lightning.trainer.states import TrainerFn
from pytorch_lightning.utilities.rank_zero import rank_zero_info

from bigdl.nano.pytorch.training.auto_lr import AutoLr
from bigdl.nano.pytorch.training.group import LocalGroup
from bigdl.nano.pytorch.training.launcher import FitLauncher
from bigdl.nano.pytorch.training.optimizers import scale_rates
from bigdl.nano.pytorch.training.processes import Processes
from bigdl.nano.pytorch.training.settings import FastSteps, Wishes

__all__ = ["ProcessesStrategy", "SingleProcessStrategy"]


class _Fast:
    """Settings around the fits of a strategy.

    Attributes
    ----------
    fitted_on : DataLoader, LightningModule, LightningDataModule or None
        What the batches of the last fit came from.
    """

    wishes: Wishes
    steps: FastSteps | None = None
    fitted_on: Any = None
    settings: tuple[str, ...] = ()
    said: Sequence[str] = ()  # of the process

    def setup(self, trainer) -> None:
        # Before optimizers are made and gradients get their buckets.
        if trainer.state.fn == TrainerFn.FITTING:
            self.steps = FastSteps(self.wishes, self.lightning_module)
            self.fitted_on = trainer.fit_loop._data_source.instance
        super().setup(trainer)
        if self.steps is not None:
            self.steps.optimizers(self.optimizers)
            self.settings = (*self.steps.report, *self._told())
            rank_zero_info(f"Nano trains with {', '.join(self.settings)}")

    def batch_to_device(self, batch: Any, device=None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return batch if self.steps is None else self.steps.batch(batch)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.steps is None:
            return super().training_step(*args, **kwargs)
        return self.steps.step(super().training_step, *args, **kwargs)

    def teardown(self) -> None:
        if self.steps is not None:
            self.steps.undo()
            self.steps = None
        super().teardown()

    def _told(self) -> list[str]:
        return [*self.said, f"{torch.get_num_threads()} threads"]


class SingleProcessStrategy(_Fast, SingleDeviceStrategy):
    """Training in the calling process, on the CPU.

    Parameters
    ----------
    wishes : Wishes
    """

    strategy_name = "nano_single_process"

    def __init__(self, wishes: Wishes):
        super().__init__(device="cpu")
        self.wishes = wishes

    def setup_optimizers(self, trainer) -> None:
        super().setup_optimizers(trainer)
        scale_rates(self.optimizers, 1)  # an earlier fit may have had more processes


class _LocalDdp(DDPStrategy):
    """DDP in a group that there is in the processes of a fit only."""

    def setup(self, trainer) -> None:
        if self.world_size > 1:
            super().setup(trainer)
        else:
            super(DDPStrategy, self).setup(trainer)

    def configure_ddp(self) -> None:
        if any(parameter.requires_grad for parameter in self.model.parameters()):
            super().configure_ddp()

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        # Lightning divides the summed counts of a figure's rows as whole numbers.
        whole = isinstance(tensor, torch.Tensor) and not tensor.is_floating_point()
        if whole and reduce_op in (None, "mean", "avg"):
            tensor = tensor.double()
        return super().reduce(tensor, group, reduce_op)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return super()._setup_model(model) if self.world_size > 1 else model


class ProcessesStrategy(_Fast, _LocalDdp):
    """Training in several processes; evaluation and prediction in the calling one, on all rows.

    Parameters
    ----------
    processes : Processes
    wishes : Wishes
    auto_lr : AutoLr
    bucket_cap_mb : float
        Megabytes of gradients that travel together.
    """

    strategy_name = "nano_processes"

    def __init__(
        self, processes: Processes, wishes: Wishes, auto_lr: AutoLr, bucket_cap_mb: float = 25.0
    ):
        super().__init__(
            parallel_devices=[torch.device("cpu")] * processes.count,
            cluster_environment=LocalGroup(),
            process_group_backend="gloo",
            find_unused_parameters=True,
            gradient_as_bucket_view=True,
            bucket_cap_mb=bucket_cap_mb,
        )
        self.processes = processes
        self.wishes = wishes
        self.auto_lr = auto_lr
        self._bucket_cap_mb = bucket_cap_mb

    @property
    def root_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Nothing: a worker knows its rank before it has a strategy."""

    def setup_distributed(self) -> None:
        """Nothing: the processes of a fit have met already."""

    def setup_optimizers(self, trainer) -> None:
        super().setup_optimizers(trainer)
        self.auto_lr.apply(trainer, self)

    def _configure_launcher(self) -> None:
        self._launcher = FitLauncher(self)

    def _told(self) -> list[str]:
        return [*self.processes.told(self._bucket_cap_mb), *self.auto_lr.told()]
