"""Searches as programs that were written for BigDL 2.x see them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from bigdl.nano.acceleration.method import Method
from bigdl.nano.acceleration.registry import methods
from bigdl.nano.acceleration.search.trial import Trial

__all__ = ["MethodsOfBigDL2", "ModelRow"]


class MethodsOfBigDL2(Mapping):
    """Methods by their names, read when they are first asked for.

    Parameters
    ----------
    framework : str
        ``"torch"`` or ``"keras"``.
    names : collection of str
        The methods that BigDL 2.x had.
    default : bool
        Whether it is about those only that are tried unasked.
    """

    def __init__(self, framework: str, names: Collection[str], default: bool):
        self._framework = framework
        self._all = names
        self._default = default

    def __getitem__(self, name: str) -> Method:
        if name not in self._names():
            raise KeyError(name)
        return methods(self._framework)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names())

    def __len__(self) -> int:
        return len(self._names())

    def __repr__(self) -> str:
        return f"{{{', '.join(self)}}}"

    def _names(self) -> list[str]:
        return [
            name
            for name, method in methods(self._framework).items()
            if name in self._all and (method.default or not self._default)
        ]


class ModelRow(Mapping):
    """One entry of ``optimized_model_dict``."""

    _KEYS = ("status", "latency", "accuracy", "model")

    def __init__(self, get_model: Callable[[str], Any], trial: Trial):
        self._get_model = get_model
        self._trial = trial

    def __getitem__(self, key: str) -> Any:
        if key not in self._KEYS:
            raise KeyError(key)
        if key != "model":
            return getattr(self._trial, key)
        return self._get_model(self._trial.method) if self._trial.usable else None

    def __iter__(self) -> Iterator[str]:
        return iter(self._KEYS)

    def __len__(self) -> int:
        return len(self._KEYS)

    def __repr__(self) -> str:
        return repr({key: self[key] for key in self._KEYS if key != "model"})
