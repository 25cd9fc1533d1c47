"""The verbs of an Estimator, for every framework: scikit-learn's manners on distributed data."""

from __future__ import annotations

from abc import ABC, abstractmethod

__all__ = ["BaseEstimator"]


class BaseEstimator(ABC):
    """What every Estimator can do; the subclasses say with which arguments."""

    @abstractmethod
    def fit(self, data, epochs: int = 1, **options):
        """Train on distributed data; another call goes on where this one ended."""

    @abstractmethod
    def evaluate(self, data, **options) -> dict | list[dict]:
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
