"""``HorovodRayRunner`` of BigDL 2.x, which runs Horovod programs on Ray."""

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
    """Runs a function in Ray workers between ``hvd.init()`` and ``hvd.shutdown()``.

    The function may use ``hvd.rank()``, ``hvd.DistributedOptimizer`` and the rest of
    ``horovod.torch``. To train a model, ``Estimator.from_torch`` with ``backend="horovod"`` takes
    less code and recovers from lost workers.

    Parameters
    ----------
    ray_ctx : OrcaRayContext, optional
        Default: the Ray connection of this process.
    worker_cls : type, optional
        Class to instantiate on each worker; the function gets the instance.
    worker_param : dict, optional
        Keyword arguments for `worker_cls`.
    workers_per_node : int, default 1
        Number of worker processes per node.

    Raises
    ------
    UsageError
        If Ray is not connected, or an argument is invalid.

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
                "worker_param holds arguments of worker_cls; pass worker_cls, too",
                code="argument-missing",
                argument="worker_cls",
            )
        if ray_ctx is not None and not ray_ctx.initialized:
            ray_ctx.init()
        self._engine = RayEngine(workers_per_node=workers_per_node)
        self._made = None if worker_cls is None else (worker_cls, dict(worker_param or {}))

    def run(self, func: Callable) -> list:
        """Call a function once on every worker.

        Parameters
        ----------
        func : callable
            Takes no arguments, or the `worker_cls` instance. The function and its result are
            pickled by value.

        Returns
        -------
        list
            The results, in the order of the ranks.

        Raises
        ------
        MissingExtraError
            If Horovod is not installed here.
        WorkerError
            If the function raised an error; it contains the worker's traceback.
        WorkerLost
            If a worker process died.
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
