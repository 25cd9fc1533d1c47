"""The backends of an Estimator: an engine, its cluster, and how gradients meet.

``backend="spark"`` of an Estimator names a :class:`Backend`. :func:`register_backend` adds one, so
that ``Estimator.from_torch(backend="mine")`` and ``Estimator.from_keras(backend="mine")`` take it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from bigdl.common.errors import UsageError, require
from bigdl.common.plugins import Registry
from bigdl.orca.cluster import ray
from bigdl.orca.cluster.plan import connect_session
from bigdl.orca.engines.connect import ConnectEngine
from bigdl.orca.engines.ray import RayEngine
from bigdl.orca.engines.spark import SparkEngine
from bigdl.runtime.cluster import Cluster
from bigdl.runtime.collectives.base import GradientSync
from bigdl.runtime.collectives.horovod import HorovodSync, require_horovod
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.engine import Engine
from bigdl.runtime.failure import FailurePolicy
from bigdl.runtime.local import LocalEngine

if TYPE_CHECKING:
    from bigdl.orca.parameter_layer.fit.loop import ParameterLayerOptions
    from bigdl.orca.parameter_layer.stragglers import DropStragglers

__all__ = ["Backend", "LocalBackend", "register_backend"]


@dataclass(frozen=True)
class LayerArguments:
    """Arguments of ``fit`` for the parameter layer, by their names; None where not passed."""

    transport: str | None = None
    group_size: int | None = None
    compression: str | None = None
    sampling: str | None = None
    drop_stragglers: dict | DropStragglers | None = None
    min_workers: int | None = None

    def passed(self) -> dict[str, Any]:
        """Return those that were passed."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Backend(ABC):
    """The meaning of a ``backend=`` of an Estimator: its engine and its GradientSync.

    Examples
    --------
    Workers that are threads of the program, one at a time:

    >>> from bigdl.orca.engine import LocalEngine
    >>> from bigdl.orca.learn.backends import Backend
    >>> class HereBackend(Backend):
    ...     def engine(self, min_workers=None, **options):
    ...         return LocalEngine(in_process=True)
    >>> HereBackend().engine().run(lambda worker: worker.rank)
    [0]
    """

    #: whether the parameter layer trains, in place of workers that all-reduce gradients
    has_parameter_layer: ClassVar[bool] = False
    #: whether it trains models of Keras that compute with JAX
    trains_jax: ClassVar[bool] = True

    def require(self) -> None:  # noqa: B027  most need none
        """Raise a MissingExtraError if a package is missing."""

    def is_on_ray(self) -> bool:
        """Return True if the workers are Ray's."""
        return False

    def sync(self) -> type[GradientSync]:
        """Return the class by which the workers' gradients meet."""
        return TorchDistributedSync

    @abstractmethod
    def engine(self, min_workers: int | None = None, **options: Any) -> Engine:
        """Return the engine whose workers train and evaluate.

        Parameters
        ----------
        min_workers : int, optional
            Of Ray; see :class:`~bigdl.orca.engines.ray.RayEngine`.
        **options
            ``workers_per_node`` and ``log_to_driver``.
        """

    def cluster(self, workers_per_node: int) -> Cluster:
        """Return where inputs are predicted."""
        return self.engine(workers_per_node=workers_per_node).cluster

    def layer_options(self, name: str, arguments: LayerArguments) -> ParameterLayerOptions | None:
        """Return the options of the parameter layer, or None if the backend has none.

        Parameters
        ----------
        name : str
            Of the backend, for the message.
        arguments : LayerArguments

        Raises
        ------
        UsageError
            For options that cannot work, and for any with another backend.
        """
        if self.is_on_ray():
            arguments = replace(arguments, min_workers=None)  # which Ray's engine takes
        if passed := arguments.passed():
            raise UsageError(
                f"{', '.join(passed)} of fit are for the parameter layer, this Estimator has "
                f"backend={name!r}; make it with backend='bigdl'",
                code="unsupported",
            )
        return None

    def failure_policy(self, max_failures: int | FailurePolicy | None) -> FailurePolicy:
        """Return the policy for ``max_failures=``."""
        return FailurePolicy.of(max_failures)

    def end_workers(self) -> None:  # noqa: B027  tasks of Spark end by themselves
        """End the workers that wait for programs."""


class SparkBackend(Backend):
    """Workers are tasks of the active Spark, also over Spark Connect."""

    def engine(self, min_workers: int | None = None, **options: Any) -> Engine:
        return (SparkEngine if connect_session() is None else ConnectEngine)(**options)


class ParameterLayerBackend(SparkBackend):
    """Gradients and weights meet in slices, by ordinary jobs of Spark."""

    has_parameter_layer = True
    trains_jax = False

    def layer_options(self, name: str, arguments: LayerArguments) -> ParameterLayerOptions:
        from bigdl.orca.parameter_layer.fit.loop import ParameterLayerOptions

        return ParameterLayerOptions(**arguments.passed())

    def failure_policy(self, max_failures: int | FailurePolicy | None) -> FailurePolicy:
        return FailurePolicy.of(FailurePolicy(5, 120.0) if max_failures is None else max_failures)


class RayBackend(Backend):
    """Workers are Ray's actors."""

    def require(self) -> None:
        require("ray", "ray")

    def is_on_ray(self) -> bool:
        return True

    def engine(self, min_workers: int | None = None, **options: Any) -> Engine:
        return RayEngine(ray.RayCluster.of_program(), min_workers=min_workers, **options)

    def end_workers(self) -> None:
        if ray.is_connected():
            RayEngine().shutdown()


class HorovodBackend(Backend):
    """Gradients meet by Horovod; workers are Ray's where the program has a Ray, else Spark's."""

    trains_jax = False

    def require(self) -> None:
        require_horovod()

    def is_on_ray(self) -> bool:
        return ray.is_connected()

    def sync(self) -> type[GradientSync]:
        return HorovodSync

    def engine(self, min_workers: int | None = None, **options: Any) -> Engine:
        return self._workers().engine(min_workers, **options)

    def end_workers(self) -> None:
        self._workers().end_workers()

    def _workers(self) -> Backend:
        return RayBackend() if self.is_on_ray() else SparkBackend()


class LocalBackend(Backend):
    """Workers are processes of this machine.

    Examples
    --------
    >>> from bigdl.orca.learn.backends import LocalBackend
    >>> LocalBackend().engine(workers_per_node=2).run(lambda worker: worker.rank)
    [0, 1]
    """

    def engine(self, min_workers: int | None = None, **options: Any) -> Engine:
        return LocalEngine(**options)

    def end_workers(self) -> None:
        LocalEngine().shutdown()


def _checked(name: str, backend: object) -> Backend:
    if isinstance(backend, type) and issubclass(backend, Backend):
        cls = backend
        try:
            backend = cls()
        except TypeError as error:  # abstract, or made of arguments
            raise UsageError(
                f"The backend {name!r} cannot be made by {cls.__qualname__}(): {error}; give "
                "it the methods of Backend, and no arguments",
                code="argument-type",
                argument="backend",
            ) from error
    if not isinstance(backend, Backend):
        raise UsageError(
            f"A backend should be a class over bigdl.orca.learn.backends.Backend, but got "
            f"{backend!r} for {name!r}",
            code="argument-type",
            argument="backend",
        )
    return backend


BACKENDS = Registry[Backend]("bigdl.backends", "a backend", _checked)
"""The backends by name, also those that other packages offer."""
for _name, _backend in {
    "spark": SparkBackend,
    "ray": RayBackend,
    "horovod": HorovodBackend,
    "bigdl": ParameterLayerBackend,
    "local": LocalBackend,
}.items():
    BACKENDS.register(_name, _backend)

_BackendT = TypeVar("_BackendT", bound=type[Backend])


def register_backend(name: str, backend: _BackendT) -> _BackendT:
    """Register a backend, so that ``backend="name"`` of an Estimator means it.

    A package that a program need not import offers its class by an entry point of the group
    ``bigdl.backends``, under the name.

    Parameters
    ----------
    name : str
    backend : type
        A class over :class:`Backend` that is made without arguments.

    Returns
    -------
    type
        The same class.

    Raises
    ------
    UsageError
        If another backend has the name, or it is no such class.

    Examples
    --------
    Workers of this machine, whose number is never more than two:

    >>> from bigdl.orca.learn.backends import LocalBackend, register_backend
    >>> class SmallBackend(LocalBackend):
    ...     def engine(self, min_workers=None, *, workers_per_node=1, **options):
    ...         return super().engine(workers_per_node=min(workers_per_node, 2), **options)
    >>> cls = register_backend("small", SmallBackend)
    >>> import torch
    >>> from bigdl.orca.learn.pytorch import Estimator
    >>> est = Estimator.from_torch(
    ...     model=lambda config: torch.nn.Linear(2, 1), loss=torch.nn.MSELoss(),
    ...     optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=0.1),
    ...     backend="small", workers_per_node=8)
    """
    BACKENDS.register(name, backend)
    return backend


def backend_of(name: str, old_names: Mapping[str, str]) -> str:
    """Return the backend that a name means, if its packages are installed.

    Parameters
    ----------
    name : str
    old_names : mapping of str to str
        Names of BigDL 2.x.

    Raises
    ------
    UsageError
        For another name, or without the packages.
    """
    backend = old_names.get(name, name)
    if backend not in BACKENDS:
        own = [repr(each) for each in BACKENDS if each not in ("bigdl", "local")]
        raise UsageError(
            f"The backends are {', '.join(own)}, 'bigdl' (the parameter layer on Spark) "
            f"and 'local' (processes of this machine), got backend={name!r}; use one of them",
            code="name-unknown",
            argument="backend",
            allowed=list(BACKENDS),
        )
    BACKENDS[backend].require()
    return backend
