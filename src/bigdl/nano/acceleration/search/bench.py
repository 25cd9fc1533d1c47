"""The framework's part of a search."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from bigdl.nano.acceleration.method import Method

__all__ = ["Bench", "Contestant"]

Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Contestant:
    """A model that is to be timed.

    Attributes
    ----------
    model
        Accelerated, or the user's.
    context : callable
        Makes the context in which the model is run, with its threads and its precision.
    """

    model: Any
    context: Callable[[], AbstractContextManager]


class Bench(abc.ABC, Generic[Batch]):
    """A model, a sample of its input, its data and its metric, as a search sees them.

    A bench is pickled to the process in which methods are tried. There :meth:`session` is entered
    once, and the other methods are called within it.

    Attributes
    ----------
    methods : mapping of str to Method
        The methods to try.
    thread_num : int or None
        Threads of the original when methods are compared with it.
    has_metric : bool
        Whether :meth:`score` measures anything.
    """

    methods: Mapping[str, Method]
    thread_num: int | None
    has_metric: bool

    @abc.abstractmethod
    def session(self) -> AbstractContextManager:
        """The surroundings of a search: the caller's threads, the model in evaluation mode."""

    @abc.abstractmethod
    def build(self, method: Method, threads: int | None) -> Contestant:
        """Apply a method."""

    @abc.abstractmethod
    def batches(self, size: int | None = None) -> list[Batch]:
        """Inputs for timing: of `size` samples each, or as the user gave them."""

    @abc.abstractmethod
    def rows(self, batch: Batch) -> int:
        """Number of samples in a batch."""

    @abc.abstractmethod
    def call(self, model: Any, batch: Batch) -> Any:
        """Run a model."""

    @abc.abstractmethod
    def difference(self, result: Any, reference: Any) -> float:
        """The largest deviation of a result, relative to the largest value of the reference.

        Raises
        ------
        UsageError
            If the two are not nested alike, or differ in a shape.
        """

    @abc.abstractmethod
    def score(self, contestant: Contestant) -> float:
        """The user's metric."""

    @abc.abstractmethod
    def save(self, model: Any, directory: Path) -> None:
        """Write an accelerated model."""

    @abc.abstractmethod
    def load(self, directory: Path) -> Contestant:
        """Read what :meth:`save` wrote, without the original where that is possible."""

    @abc.abstractmethod
    def drop_original(self) -> None:
        """Let go of the user's model: this bench only measures loaded ones from now on."""
