"""The verbs of an Estimator, for every framework: scikit-learn's manners on distributed data."""

from __future__ import annotations

from abc import ABC, abstractmethod

from bigdl.common.errors import UsageError

__all__ = ["BaseEstimator", "check_positive"]


class BaseEstimator(ABC):
    """What every Estimator can do; the subclasses say with which arguments."""

    @abstractmethod
    def fit(self, data, epochs: int = 1, **options):
        """Train on distributed data; another call goes on where this one ended."""

    @abstractmethod
    def evaluate(self, data, **options) -> dict:
        """Loss and metrics on distributed data."""

    @abstractmethod
    def predict(self, data, **options):
        """The input with a prediction for every row."""

    @abstractmethod
    def get_model(self):
        """The trained model, on the driver."""

    @abstractmethod
    def save(self, path: str) -> str:
        """Write the model."""

    @abstractmethod
    def load(self, path: str) -> None:
        """Read what :meth:`save` wrote."""

    @abstractmethod
    def shutdown(self) -> None:
        """Free what the Estimator holds."""


def check_positive(name: str, value, *, minimum: int = 1) -> int:
    """An integer of at least `minimum`, or a UsageError that names the argument."""
    import numbers

    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < minimum:
        kind = "a positive integer" if minimum == 1 else f"an integer of at least {minimum}"
        raise UsageError(f"{name} should be {kind}, got {value!r}")
    return int(value)
