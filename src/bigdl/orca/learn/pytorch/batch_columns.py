"""What of a batch goes to the model, and what are the targets."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bigdl.common.errors import UsageError

__all__ = ["BatchColumns", "check_keywords"]

_ELSE = "or pass a MainCallback, whose on_iter_forward takes the batch apart"


@dataclass(frozen=True)
class BatchColumns:
    """Names within batches that are dicts; other batches are ``(*features, target)``.

    Attributes
    ----------
    features : sequence of str, optional
        Keys that become the model's arguments of the same names; default all but the targets.
    labels : sequence of str, optional
        Keys of the targets.
    """

    features: Sequence[str] | None = None
    labels: Sequence[str] | None = None

    def split(self, batch: Any) -> tuple[list, dict, Any]:
        """Take a batch apart.

        Returns
        -------
        inputs : list
            Of the model, by position.
        named : dict
            Those by name.
        target : object
            A tuple for several label columns.

        Raises
        ------
        UsageError
            For a dict without the keys that are named, or without names.
        """
        if not isinstance(batch, Mapping):
            *features, target = batch
            return features, {}, target
        if not self.labels:
            raise UsageError(
                f"The batches are dicts of {list(batch)}; name the keys of the targets with "
                f"label_cols=, {_ELSE}"
            )
        features = self.features or [key for key in batch if key not in self.labels]
        for key in (*features, *self.labels):
            if key not in batch:
                raise UsageError(f"The batches have no {key!r}; they are dicts of {list(batch)}")
        targets = tuple(batch[key] for key in self.labels)
        named = {key: batch[key] for key in features}
        return [], named, targets[0] if len(targets) == 1 else targets


def check_keywords(model, named: Mapping[str, Any]) -> None:
    """Refuse keyword arguments that the forward of a model does not take."""
    signature = inspect.signature(model.forward)
    try:
        signature.bind(**named)
    except TypeError as error:
        raise UsageError(
            f"The batches are dicts, so their features {list(named)} are given to the model by "
            f"name, but its forward takes {signature} ({error}); name the keys that it takes with "
            f"feature_cols=, {_ELSE}"
        ) from None
