"""The process group of a training, as Lightning sees it."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric.plugins.environments import LightningEnvironment

from bigdl.nano.pytorch.training.options import TrainingOptions


def ddp_arguments(group: LocalGroup, options: TrainingOptions) -> dict[str, Any]:
    """Return arguments of Lightning's DDP strategies in a group of processes."""
    return {
        "parallel_devices": [torch.device("cpu")] * options.count,
        "cluster_environment": group,
        "process_group_backend": "gloo",
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": options.bucket_cap_mb,
    }


class LocalGroup(LightningEnvironment):
    """The place of this process among those that :mod:`.processes` has started.

    In the process that calls ``fit`` there is no group: it has one rank.
    """

    creates_processes_externally = True

    def join(self, rank: int, size: int) -> None:
        """Say which place this process has; Lightning's log is that of the first."""
        self.set_global_rank(rank)
        self.set_world_size(size)

    def local_rank(self) -> int:
        return self.global_rank()

    def teardown(self) -> None:
        """Nothing: the environment of the process is the user's."""
