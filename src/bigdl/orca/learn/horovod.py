"""Programs of Horovod on Ray, under the name of BigDL 2.x."""

from collections.abc import Callable
from typing import Any

import cloudpickle

from bigdl.common.errors import UsageError
from bigdl.orca.engines.ray import RayEngine
from bigdl.orca.ray import OrcaRayContext
from bigdl.runtime.collectives.horovod import HorovodSync, require_horovod
from bigdl.runtime.worker import Worker

__all__ = ["HorovodRayRunner"]


class HorovodRayRunner:
    """Runs a function in processes of Ray between ``hvd.init()`` and ``hvd.shutdown()``.

    What the function does is up to the user: ``hvd.rank()``, ``hvd.DistributedOptimizer`` and the
    rest of ``horovod.torch`` work in it. To train a model, ``Estimator.from_torch`` with
    ``backend="horovod"`` takes less code, and recovers from losses.

    Parameters
    ----------
    ray_ctx : OrcaRayContext, optional
        Default: the Ray of this process.
    worker_cls : type, optional
        A class, one object of which is made in each process and given to the function.
    worker_param : dict, optional
        Keyword arguments for `worker_cls`.
    workers_per_node : int, default 1

    Raises
    ------
    UsageError
        Without an active Ray, or for an argument that cannot work.

    Examples
    --------
    >>> from bigdl.orca import init_orca_context
    >>> from bigdl.orca.learn.horovod import HorovodRayRunner
    >>> sc = init_orca_context("local", cores=2, init_ray_on_spark=True)
    >>> def rank():
    ...     import horovod.torch as hvd
    ...     return hvd.rank()
    >>> runner = HorovodRayRunner(workers_per_node=2)
    >>> runner.run(rank)  # doctest: +SKIP
    [0, 1]
    """

    def __init__(
        self,
        ray_ctx: OrcaRayContext | None = None,
        worker_cls: type | None = None,
        worker_param: dict[str, Any] | None = None,
        workers_per_node: int = 1,
    ):
        if worker_cls is not None and not isinstance(worker_cls, type):
            raise UsageError(
                f"worker_cls should be a class or None, got {worker_cls!r}",
                code="argument-type",
                argument="worker_cls",
            )
        if worker_param and worker_cls is None:
            raise UsageError(
                "worker_param are arguments of worker_cls; give that, too",
                code="argument-missing",
                argument="worker_cls",
            )
        if ray_ctx is not None and not ray_ctx.initialized:
            ray_ctx.init()
        self._engine = RayEngine(workers_per_node=workers_per_node)
        self._made = None if worker_cls is None else (worker_cls, dict(worker_param or {}))

    def run(self, func: Callable) -> list:
        """Call a function once in every process.

        Parameters
        ----------
        func : callable
            Without arguments, or with `worker_cls` of the object. It travels by value, as what it
            returns does.

        Returns
        -------
        list
            What it returned, by rank.

        Raises
        ------
        MissingExtraError
            If Horovod is not installed here.
        WorkerError
            If it raised, with the traceback of the worker.
        WorkerLost
            If a process went away.
        """
        require_horovod()
        return [cloudpickle.loads(each) for each in self._engine.run(_program(func, self._made))]


def _program(func: Callable, made: tuple[type, dict] | None) -> Callable[[Worker], bytes]:
    def program(worker: Worker) -> bytes:
        import horovod.torch as hvd

        sync = HorovodSync(worker)
        sync.start()
        if worker.world_size == 1:
            hvd.init()
        try:
            objects = [] if made is None else [made[0](**made[1])]
            return cloudpickle.dumps(func(*objects))
        finally:
            sync.stop()
            if worker.world_size == 1:
                hvd.shutdown()

    return program
