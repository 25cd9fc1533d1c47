"""Functions in several processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.runtime.launch import launch

__all__ = ["MultiprocessingBackend"]


class MultiprocessingBackend:
    """Runs a function in fresh processes of this machine.

    :func:`bigdl.runtime.launch.launch` says how they start and end.
    """

    def setup(self) -> None:
        """Nothing has to be prepared."""

    def run(
        self,
        target: Callable,
        args: Iterable[Any] = (),
        nprocs: int = 1,
        envs: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[Any]:
        """Call a function in every process and return the results in their order.

        Parameters
        ----------
        target : callable
            ``target(*args)``; it may be of a script or a notebook.
        args : iterable
        nprocs : int
        envs : sequence of mappings, optional
            Additions to the environment, one for each process.

        Returns
        -------
        list

        Raises
        ------
        UsageError
            If there is not one of `envs` for every process.
        WorkerError
            If `target` raised.
        """
        if envs is not None and len(envs) != nprocs:
            raise UsageError(f"envs must be one for each of {nprocs} processes, got {len(envs)}")
        return launch(_call, nprocs, (target, tuple(args), envs))

    def shutdown(self) -> None:
        """No process is left after a run."""


def _call(rank: int, target: Callable, args: tuple, envs: Sequence[Mapping] | None) -> Any:
    if envs is not None:
        os.environ.update({name: str(value) for name, value in envs[rank].items()})
    return target(*args)
