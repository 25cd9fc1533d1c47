"""The process group of a training, as Lightning sees it."""

from __future__ import annotations

from typing import Any

import torch
from lightning_fabric.plugins import ClusterEnvironment

from bigdl.nano.pytorch.training.options import TrainingOptions
from bigdl.nano.pytorch.training.processes import Processes

__all__ = ["LocalGroup", "ddp_arguments"]


def ddp_arguments(
    processes: Processes, group: LocalGroup, options: TrainingOptions
) -> dict[str, Any]:
    """Return arguments of Lightning's DDP strategies in a group of processes."""
    return {
        "parallel_devices": [torch.device("cpu")] * processes.count,
        "cluster_environment": group,
        "process_group_backend": "gloo",
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "bucket_cap_mb": options.bucket_cap_mb,
    }


class LocalGroup(ClusterEnvironment):
    """The place of this process among those that :mod:`.processes` has started.

    In the process that calls ``fit`` there is no group: it has one rank.
    """

    def __init__(self) -> None:
        self._rank, self._size = 0, 1

    def join(self, rank: int, size: int) -> None:
        """Say which place this process has."""
        self._rank, self._size = rank, size

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    @staticmethod
    def detect() -> bool:
        return True

    def world_size(self) -> int:
        return self._size

    def set_world_size(self, size: int) -> None:
        """Nothing: the size is known."""

    def global_rank(self) -> int:
        return self._rank

    def set_global_rank(self, rank: int) -> None:
        """Nothing: the rank is known."""

    def local_rank(self) -> int:
        return self._rank

    def node_rank(self) -> int:
        return 0
