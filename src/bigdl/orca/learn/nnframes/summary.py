"""Figures of a training, step by step and epoch by epoch."""

from __future__ import annotations

from bigdl.common.errors import UsageError

__all__ = ["Summary", "TrainSummary", "ValidationSummary"]


class Summary:
    """Where the figures of a training go; read them here when it has ended.

    Parameters
    ----------
    log_dir : str
        TensorBoard finds the figures below ``<log_dir>/<app_name>``.
    app_name : str
    """

    _getter = ""

    def __init__(self, log_dir: str, app_name: str):
        self.log_dir, self.app_name = log_dir, app_name
        self._estimator = None

    def read_scalar(self, tag: str) -> list:
        """The figures under a tag, as ``[step, value, time]``.

        Raises
        ------
        UsageError
            Before a ``fit`` that this summary was given to.
        """
        if self._estimator is None:
            raise UsageError(
                f"{type(self).__name__} has no figures yet; give it to an NNEstimator and call fit"
            )
        return getattr(self._estimator, self._getter)(tag)

    def _take(self, estimator) -> None:
        self._estimator = estimator

    def __repr__(self):
        return f"{type(self).__name__}({self.log_dir!r}, {self.app_name!r})"


class TrainSummary(Summary):
    """``Loss``, ``LearningRate`` and ``Throughput`` of every step."""

    _getter = "get_train_summary"


class ValidationSummary(Summary):
    """The loss and the metrics of every validation, by their names."""

    _getter = "get_validation_summary"
