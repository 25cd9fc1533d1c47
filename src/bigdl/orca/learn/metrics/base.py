"""The description of a metric, as the user gives it to an Estimator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from bigdl.common.errors import UsageError

if TYPE_CHECKING:
    from bigdl.orca.learn.metrics.state import TorchMetric

__all__ = ["Metric"]


class Metric(ABC):
    """A metric by name and parameters; it holds no data.

    The Estimator keeps it on the driver, sends it to the workers, and calls :meth:`get_metric`
    once per evaluation and worker.  A subclass stores its parameters in the constructor and
    implements :meth:`_torch_metric`.
    """

    def get_name(self) -> str:
        """Return the name under which the figure is reported."""
        return type(self).__name__

    def get_metric(self, backend: str | None = None) -> TorchMetric:
        """Make a fresh state for one evaluation.

        Parameters
        ----------
        backend : {None, "pytorch"}
            The framework whose tensors will be fed.

        Returns
        -------
        TorchMetric

        Raises
        ------
        UsageError
            If `backend` is another one.
        """
        if backend not in (None, "pytorch"):
            raise UsageError(
                f'{self.get_name()} exists for the backend "pytorch", but {backend!r} was asked for'
            )
        return self._torch_metric()

    @abstractmethod
    def _torch_metric(self) -> TorchMetric:
        """Make the torch state; called on every worker."""

    @staticmethod
    def convert_metrics_list(metrics: Any, backend: str | None = None) -> list[TorchMetric]:
        """Make fresh states from whatever a user may pass as ``metrics=``.

        Parameters
        ----------
        metrics : object, sequence of object, or None
            Each object is a :class:`Metric`, the name of one (``"accuracy"``, ``"mse"``, ...;
            case and underscores do not matter), a ``torchmetrics.Metric`` instance (copied, never
            touched), a function ``fn(preds, targets)`` (see :class:`CustomizedMetric`), or an
            object that follows the contract of :class:`TorchMetric`.
        backend : {None, "pytorch"}
            The framework whose tensors will be fed.

        Returns
        -------
        list of TorchMetric
            In the order given; names are unique, also when case is ignored (a second
            ``Precision`` becomes ``Precision_2``).

        Raises
        ------
        UsageError
            If an object is none of these, or its state cannot be merged across workers.
        """
        from bigdl.orca.learn.metrics.conversion import convert_metrics

        return convert_metrics(metrics, backend)

    @staticmethod
    def convert_metrics_dict(metrics: Any, backend: str | None = None) -> dict[str, TorchMetric]:
        """Do as :meth:`convert_metrics_list`, keyed by name.

        Parameters
        ----------
        metrics : object, sequence of object, or None
            See :meth:`convert_metrics_list`.
        backend : {None, "pytorch"}
            The framework whose tensors will be fed.

        Returns
        -------
        dict of str to TorchMetric

        Raises
        ------
        UsageError
            As :meth:`convert_metrics_list`.
        """
        return {metric.name: metric for metric in Metric.convert_metrics_list(metrics, backend)}
