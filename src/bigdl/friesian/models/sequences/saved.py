"""Saved sequence models: a folder with the weights, the item of each id, and the arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from bigdl.common.checks import check_integer
from bigdl.common.errors import UsageError
from bigdl.friesian.models.sequences import networks
from bigdl.friesian.models.sequences.networks import SequenceModel

__all__ = ["SavedSequenceModel", "window_start"]

SAVED_FACTS, SAVED_WEIGHTS, SAVED_ITEMS = "recommender.json", "weights.pt", "items.parquet"
SEQUENCE_MODELS = {
    "sasrec": "SASRec",
    "hstu": "HSTU",
    "gru4rec": "GRU4Rec",
    "bert4rec": "BERT4Rec",
}


def window_start(total: int, max_len: int, stride: int) -> int:
    """Return the index of the first event that a model reads of a history.

    Parameters
    ----------
    total : int
        Number of events of the history.
    max_len : int
        Maximum number of events to read.
    stride : int
        Number of events by which the window is shifted.
    """
    return max(-(-(total - max_len) // stride) * stride, 0)


@dataclass(frozen=True)
class SavedSequenceModel:
    """Trained sequence model with the items of its ids, as ``SequenceRecommender.save`` writes it.

    Attributes
    ----------
    network : SequenceModel
    items : pyarrow.Array
        Item of each id from 1.
    max_len : int
        Number of events that the model reads.
    stride : int
        See ``SequenceRecommender``.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.models.sequences import SavedSequenceModel
    >>> from bigdl.friesian.sequential import SequenceRecommender
    >>> clicks = pd.DataFrame({"user": [1, 1, 1], "item": [5, 8, 9], "time": [1, 2, 3]})
    >>> SequenceRecommender("gru4rec", dim=8, epochs=1).fit(clicks).save("model")
    >>> saved = SavedSequenceModel.read("model")
    >>> saved.items.to_pylist(), type(saved.network).__name__
    ([5, 8, 9], 'GRU4Rec')
    """

    network: SequenceModel
    items: pa.Array
    max_len: int
    stride: int = 1

    def __post_init__(self) -> None:
        check_integer("stride", self.stride, 1, self.max_len)
        if len(self.items) + 1 != self.network.items.size:
            raise UsageError(
                f"The model has {self.network.items.size} ids, which are padding and "
                f"{self.network.items.size - 1} items, but there are {len(self.items)} items",
                code="model-mismatch",
            )

    def write(
        self,
        folder: str | Path,
        name: str | None = None,
        options: Mapping[str, object] | None = None,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        """Write the model into a folder; the files contain no code.

        Parameters
        ----------
        folder : str or Path
        name : str, optional
            Name of the model's class, such as ``"sasrec"``; without it, :meth:`read` cannot create
            the model.
        options : dict, optional
            Arguments of the class. Objects, such as a loss, are not written: a server needs none.
        facts : dict, optional
            Further values for the JSON file.
        """
        content = {
            "items": len(self.items),
            "max_len": self.max_len,
            "stride": self.stride,
            "model": name,
            "options": plain_options(options),
            **(facts or {}),
        }
        folder = Path(folder)
        pq.write_table(pa.table({"item": self.items}), folder / SAVED_ITEMS)
        torch.save(self.network.state_dict(), folder / SAVED_WEIGHTS)
        (folder / SAVED_FACTS).write_text(json.dumps(content))

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read a model.

        Parameters
        ----------
        folder : str or Path
            Folder of :meth:`write` or of ``SequenceRecommender.save``.

        Raises
        ------
        UsageError
            If the folder is incomplete, or its model was created by a function.
        """
        folder = Path(folder)
        try:
            facts = json.loads((folder / SAVED_FACTS).read_text())
            state = torch.load(folder / SAVED_WEIGHTS, weights_only=True)
            if (folder / SAVED_ITEMS).exists():
                items = pq.read_table(folder / SAVED_ITEMS)["item"].combine_chunks()
            else:  # written by BigDL 3.0
                items = pq.read_table(folder / "history.parquet")[facts["item_col"]]
                items = pc.unique(items.combine_chunks())
                items = items.take(pc.sort_indices(items))
        except FileNotFoundError as error:
            raise UsageError(
                f"{str(folder)!r} has no saved sequence model ({error}); pass a folder that "
                "SequenceRecommender.save wrote",
                code="path-missing",
                path=str(folder),
            ) from None
        except (OSError, KeyError, ValueError, RuntimeError) as error:
            raise UsageError(
                f"The sequence model in {str(folder)!r} cannot be read: {error}",
                code="file-damaged",
                path=str(folder),
            ) from error
        if facts.get("model") not in SEQUENCE_MODELS:
            raise UsageError(
                f"The model in {str(folder)!r} was created by a function, or saved by an older "
                f"version; save it again with model= one of {list(SEQUENCE_MODELS)}",
                code="model-unsupported",
                path=str(folder),
            )
        if "items.table.weight" not in state:
            raise UsageError(
                f"The model in {str(folder)!r} has a sharded or growing embedding, which a server "
                "cannot load; train it with embedding='dense'",
                code="model-unsupported",
                path=str(folder),
            )
        network = network_of(facts["model"], facts, state)
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            raise UsageError(
                f"The weights in {str(folder)!r} do not fit its arguments: {error}",
                code="file-damaged",
                path=str(folder),
            ) from error
        return cls(network.eval(), items, facts["max_len"], facts.get("stride", 1))


def plain_options(options: Mapping[str, object] | None) -> dict[str, object]:
    """Return the arguments of a model's class that a server needs and JSON can hold."""
    return {
        key: value
        for key, value in (options or {}).items()
        if isinstance(value, int | float | str) and key != "embedding"
    }


def network_of(
    name: str, facts: Mapping[str, object], state: Mapping[str, torch.Tensor]
) -> SequenceModel:
    """Create a model for a saved state; features and vectors of items come from the state."""
    options = dict(facts["options"])  # type: ignore[call-overload]
    if (codes := state.get("items.features")) is not None:
        total, columns = len(state["items.of_features.weight"]), codes.shape[1]
        options["item_features"] = torch.zeros_like(codes).numpy()
        options["item_feature_sizes"] = [total - columns + 1, *[1] * (columns - 1)]
    if (vectors := state.get("items.vectors")) is not None:
        options["item_vectors"] = torch.zeros_like(vectors).numpy()
    made: SequenceModel = getattr(networks, SEQUENCE_MODELS[name])(
        len(state["items.table.weight"]), facts["max_len"], **options
    )
    return made
