"""Static types of ``predict``: the result type follows from the input type."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import ray.data
    from pyspark.sql import DataFrame

    from bigdl.orca.data.xshards import SparkXShards
    from bigdl.orca.data.xshards.ray import RayXShards

P = ParamSpec("P")
D = TypeVar("D", "DataFrame", "SparkXShards", "RayXShards", "ray.data.Dataset", "pd.DataFrame")


class Predict(Protocol[P]):
    """Type of ``estimator.predict``: the result type follows from the type of `data`."""

    @overload
    def __call__(self, data: np.ndarray, *args: P.args, **kwargs: P.kwargs) -> np.ndarray | Any: ...
    @overload
    def __call__(self, data: D, *args: P.args, **kwargs: P.kwargs) -> D: ...
    @overload
    def __call__(
        self,
        data: str | os.PathLike | Sequence[str] | Sequence[np.ndarray] | Mapping[str, Any],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> Any: ...  # arrays by output, or a frame of the cluster


class PredictMethod(Protocol[P]):
    """Static type of a ``predict`` method; an instance's ``predict`` has type :class:`Predict`."""

    def __get__(self, instance: object, owner: type | None = None) -> Predict[P]: ...


def typed_predict(method: Callable[Concatenate[Any, Any, P], Any]) -> PredictMethod[P]:
    """Return a method ``predict(self, data, ...)`` unchanged, typed with Predict's overloads."""
    return cast("PredictMethod[P]", method)
