"""Cluster environment of Lightning for Nano's local training processes."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric.plugins.environments import LightningEnvironment

from bigdl.nano.pytorch.training.options import TrainingOptions


def ddp_arguments(group: LocalGroup, options: TrainingOptions) -> dict[str, Any]:
    """Return the arguments of Lightning's DDP strategies for a local process group."""
    return {
        "parallel_devices": [torch.device("cpu")] * options.count,
        "cluster_environment": group,
        "process_group_backend": "gloo",
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": options.bucket_cap_mb,
    }


class LocalGroup(LightningEnvironment):
    """Lightning environment with the rank of a process that :mod:`.processes` has started.

    The process that calls ``fit`` is not in a group: its rank is 0 and its world size 1.
    """

    creates_processes_externally = True

    def join(self, rank: int, size: int) -> None:
        """Set rank and world size; only rank 0 logs."""
        self.set_global_rank(rank)
        self.set_world_size(size)

    def local_rank(self) -> int:
        return self.global_rank()

    def teardown(self) -> None:
        """Do nothing: the process's environment belongs to the user."""
