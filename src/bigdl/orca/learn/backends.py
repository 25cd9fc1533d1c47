"""Estimator backends, which select the worker engine, cluster and gradient synchronization.

An Estimator's ``backend="spark"`` selects a registered :class:`Backend`. :func:`register_backend`
registers another one for ``Estimator.from_torch(backend="mine")`` and
``Estimator.from_keras(backend="mine")``.
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
    """Arguments of ``fit`` for the parameter layer; an argument is None if it was not passed."""

    transport: str | None = None
    group_size: int | None = None
    compression: str | None = None
    sampling: str | None = None
    drop_stragglers: dict | DropStragglers | None = None
    min_workers: int | None = None

    def passed(self) -> dict[str, Any]:
        """Return the arguments that are not None as a dict."""
        return {name: value for name, value in vars(self).items() if value is not None}


class Backend(ABC):
    """Base class of Estimator backends, which choose worker engines and gradient synchronization.

    Examples
    --------
    A backend that runs its worker in the program itself:

    >>> from bigdl.orca.engine import LocalEngine
    >>> from bigdl.orca.learn.backends import Backend
    >>> class HereBackend(Backend):
    ...     def engine(self, min_workers=None, **options):
    ...         return LocalEngine(in_process=True)
    >>> HereBackend().engine().run(lambda worker: worker.rank)
    [0]
    """

    # : whether the parameter layer trains, instead of workers that all-reduce gradients
    has_parameter_layer: ClassVar[bool] = False
    # : whether the backend trains Keras models that use the JAX backend of Keras
    trains_jax: ClassVar[bool] = True

    def require(self) -> None:  # noqa: B027  most backends need none
        """Raise a MissingExtraError if a required package is missing."""

    def is_on_ray(self) -> bool:
        """Return True if the workers are Ray actors."""
        return False

    def sync(self) -> type[GradientSync]:
        """Return the class that all-reduces the workers' gradients."""
        return TorchDistributedSync

    @abstractmethod
    def engine(self, min_workers: int | None = None, **options: Any) -> Engine:
        """Return the engine that runs the training and evaluation workers.

        Parameters
        ----------
        min_workers : int, optional
            Minimum number of Ray workers; see :class:`~bigdl.orca.engines.ray.RayEngine`.
        **options
            ``workers_per_node`` and ``log_to_driver``.
        """

    def cluster(self, workers_per_node: int) -> Cluster:
        """Return the cluster that runs prediction tasks."""
        return self.engine(workers_per_node=workers_per_node).cluster

    def layer_options(self, name: str, arguments: LayerArguments) -> ParameterLayerOptions | None:
        """Return the options of the parameter layer, or None if the backend does not use it.

        Parameters
        ----------
        name : str
            Name of the backend, for the error message.
        arguments : LayerArguments

        Raises
        ------
        UsageError
            If an option is invalid, or if the backend has no parameter layer.
        """
        if self.is_on_ray():
            arguments = replace(arguments, min_workers=None)  # the Ray engine takes it
        if passed := arguments.passed():
            raise UsageError(
                f"{', '.join(passed)} of fit are for the parameter layer, but this Estimator has "
                f"backend={name!r}; create it with backend='bigdl'",
                code="unsupported",
            )
        return None

    def failure_policy(self, max_failures: int | FailurePolicy | None) -> FailurePolicy:
        """Convert the argument ``max_failures=`` to a failure policy."""
        return FailurePolicy.of(max_failures)

    def end_workers(self) -> None:  # noqa: B027  Spark tasks end by themselves
        """Stop the idle workers."""


class SparkBackend(Backend):
    """Backend whose workers are tasks of the active Spark session, classic or Spark Connect."""

    def engine(
        self, min_workers: int | None = None, **options: Any
    ) -> Engine:  # options: of the engine
        return (SparkEngine if connect_session() is None else ConnectEngine)(**options)


class ParameterLayerBackend(SparkBackend):
    """Backend that updates slices of the weights with ordinary Spark jobs."""

    has_parameter_layer = True
    trains_jax = False

    def layer_options(self, name: str, arguments: LayerArguments) -> ParameterLayerOptions:
        from bigdl.orca.parameter_layer.fit.loop import ParameterLayerOptions

        return ParameterLayerOptions(**arguments.passed())

    def failure_policy(self, max_failures: int | FailurePolicy | None) -> FailurePolicy:
        return FailurePolicy.of(FailurePolicy(5, 120.0) if max_failures is None else max_failures)


class RayBackend(Backend):
    """Backend whose workers are Ray actors."""

    def require(self) -> None:
        require("ray", "ray")

    def is_on_ray(self) -> bool:
        return True

    def engine(
        self, min_workers: int | None = None, **options: Any
    ) -> Engine:  # options: of the engine
        return RayEngine(ray.RayCluster.of_program(), min_workers=min_workers, **options)

    def end_workers(self) -> None:
        if ray.is_connected():
            RayEngine().shutdown()


class HorovodBackend(Backend):
    """Backend that all-reduces gradients with Horovod, on Ray if connected, else on Spark."""

    trains_jax = False

    def require(self) -> None:
        require_horovod()

    def is_on_ray(self) -> bool:
        return ray.is_connected()

    def sync(self) -> type[GradientSync]:
        return HorovodSync

    def engine(
        self, min_workers: int | None = None, **options: Any
    ) -> Engine:  # options: of the engine
        return self._workers().engine(min_workers, **options)

    def end_workers(self) -> None:
        self._workers().end_workers()

    def _workers(self) -> Backend:
        return RayBackend() if self.is_on_ray() else SparkBackend()


class LocalBackend(Backend):
    """Backend whose workers are processes on this machine.

    Examples
    --------
    >>> from bigdl.orca.learn.backends import LocalBackend
    >>> LocalBackend().engine(workers_per_node=2).run(lambda worker: worker.rank)
    [0, 1]
    """

    def engine(
        self, min_workers: int | None = None, **options: Any
    ) -> Engine:  # options: of the engine
        return LocalEngine(**options)

    def end_workers(self) -> None:
        LocalEngine().shutdown()


def _checked(name: str, backend: object) -> Backend:
    if isinstance(backend, type) and issubclass(backend, Backend):
        cls = backend
        try:
            backend = cls()
        except TypeError as error:  # abstract class, or required constructor arguments
            raise UsageError(
                f"The backend {name!r} cannot be created by {cls.__qualname__}(): {error}; "
                "implement "
                "the methods of Backend, and take no constructor arguments",
                code="argument-type",
                argument="backend",
            ) from error
    if not isinstance(backend, Backend):
        raise UsageError(
            f"A backend should be a subclass of bigdl.orca.learn.backends.Backend, got {backend!r} "
            f"for {name!r}",
            code="argument-type",
            argument="backend",
        )
    return backend


BACKENDS = Registry[Backend]("bigdl.backends", "a backend", _checked)
"""Registry of backends by name, including entry points of other packages."""
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
    """Register a backend under a name for the ``backend=`` argument of Estimators.

    A package can instead declare its class as an entry point in the group ``bigdl.backends``; then
    the program need not import the package.

    Parameters
    ----------
    name : str
    backend : type
        A subclass of :class:`Backend` whose constructor takes no arguments.

    Returns
    -------
    type
        The same class.

    Raises
    ------
    UsageError
        If another backend has the name, or `backend` is not such a class.

    Examples
    --------
    A local backend with at most two workers:

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


def resolve_backend(name: str, old_names: Mapping[str, str]) -> str:
    """Return the current name of a backend and check that its packages are installed.

    Parameters
    ----------
    name : str
    old_names : mapping of str to str
        Current names by BigDL 2.x name.

    Raises
    ------
    UsageError
        If the name is unknown or a package is missing.
    """
    backend = old_names.get(name, name)
    if backend not in BACKENDS:
        names = [repr(each) for each in BACKENDS if each not in ("bigdl", "local")]
        raise UsageError(
            f"The backends are {', '.join(names)}, 'bigdl' (the parameter layer on Spark) "
            f"and 'local' (processes on this machine), got backend={name!r}; use one of them",
            code="name-unknown",
            argument="backend",
            allowed=list(BACKENDS),
        )
    BACKENDS[backend].require()
    return backend
