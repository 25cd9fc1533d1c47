"""Candidate generators and rankers that run in this process, with an index and a model.

============  ==========================================  ========================================
part          method                                      local or remote class
============  ==========================================  ========================================
features      ``read(table, ids, columns)``               :class:`FeatureStore`, `RemoteFeatures`
recall        ``candidates(user_ids, k)``                 :class:`IndexRecall`, `RemoteRecall`
ranking       ``predict(inputs)``                         any model with it, `RemoteRanker`
============  ==========================================  ========================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa

from bigdl.common.errors import UsageError
from bigdl.friesian.serving.filters import ItemFilter
from bigdl.friesian.serving.index import Candidates, ItemIndex
from bigdl.friesian.serving.rows import ids_of
from bigdl.friesian.serving.stages import FeatureReader
from bigdl.nano.serving.model import ServedModel
from bigdl.nano.serving.repository import ModelRepository

if TYPE_CHECKING:
    import torch

Scores = np.ndarray | Mapping[str, np.ndarray]
"""A score for each row; a dict of such arrays for several tasks."""


class CandidateGenerator(Protocol):
    """Protocol of objects that find candidate items for users.

    Generators that support filters have a third parameter of ``candidates``, `item_filter`, and
    methods ``check_filter`` and ``accepts``, as :class:`IndexRecall` has.
    """

    def candidates(self, user_ids: np.ndarray, k: int) -> Candidates:
        """Return up to `k` items per user, best first; unknown users get no items."""


@runtime_checkable
class FilteringGenerator(Protocol):
    """Protocol of candidate generators that support filters of items."""

    def check_filter(self, item_filter: ItemFilter) -> None:
        """Raise a UsageError if a filter cannot be applied."""

    def accepts(self, items: np.ndarray, item_filter: ItemFilter) -> np.ndarray:
        """Return a mask of the items that a filter accepts."""

    def candidates(
        self, user_ids: np.ndarray, k: int, item_filter: ItemFilter | None = None
    ) -> Candidates:
        """Return up to `k` accepted items per user, best first."""


class Ranker(Protocol):
    """Protocol of models that score rows; several threads may call a ranker at once."""

    def predict(self, inputs: dict[str, np.ndarray]) -> Scores:
        """Return a score for each row, or a dict from tasks to scores for a multi-task model."""


class IndexRecall:
    """Candidate generator that searches an index with user vectors from a store.

    Parameters
    ----------
    store : FeatureReader
    index : ItemIndex
    vector_col : str, default "prediction"
        Column with the user vectors.
    seen_col : str, optional
        Column of lists with items to exclude for a user.
    table : str, default "user"

    Examples
    --------
    >>> import numpy as np
    >>> import pandas as pd
    >>> from bigdl.friesian.serving import EmbeddedStore, IndexRecall, ItemIndex
    >>> store = EmbeddedStore("features")
    >>> users = pd.DataFrame({"user": [1], "prediction": [[1.0, 0.5]], "seen": [[10]]})
    >>> _ = store.replace({"user": users})
    >>> recall = IndexRecall(store, ItemIndex([10, 20], np.eye(2)), seen_col="seen")
    >>> candidates = recall.candidates(np.array([1, 2]), 5)
    >>> candidates.ids.tolist(), candidates.counts.tolist()  # the user 2 is unknown
    ([20], [1, 0])
    """

    def __init__(
        self,
        store: FeatureReader,
        index: ItemIndex,
        vector_col: str = "prediction",
        seen_col: str | None = None,
        table: str = "user",
    ):
        self.store, self.index = store, index
        self._vector_col, self._seen_col, self._table = vector_col, seen_col, table
        self._columns = [vector_col] if seen_col is None else [vector_col, seen_col]

    def check_filter(self, item_filter: ItemFilter) -> None:
        """Raise a UsageError if a filter uses unknown attributes of the index."""
        self.index.attributes.check(item_filter)

    def accepts(self, items: np.ndarray, item_filter: ItemFilter) -> np.ndarray:
        """Return a mask of the items that a filter accepts."""
        return self.index.attributes.mask(items, item_filter)

    def candidates(
        self, user_ids: np.ndarray, k: int, item_filter: ItemFilter | None = None
    ) -> Candidates:
        """Return up to `k` items per user, best first; unknown users get no items."""
        users = self.store.read(self._table, user_ids, self._columns)
        known = np.flatnonzero(users.found)
        vectors = users[self._vector_col]
        if isinstance(vectors, pa.Array):
            raise UsageError(
                f"The column {self._vector_col} of the table {self._table} should have vectors of "
                f"one length without nulls, but is {vectors.type}",
                code="data-shape",
                column=self._vector_col,
            )
        seen = None
        if self._seen_col is not None:
            lists = users[self._seen_col]
            rows = lists.take(pa.array(known)) if isinstance(lists, pa.Array) else lists[known]
            seen = [_items_of(each) for each in rows]
        candidates = self.index.search(vectors[known], k, seen, item_filter=item_filter)
        if len(known) == len(users):
            return candidates
        counts = np.zeros(len(users), np.int64)
        counts[known] = candidates.counts
        return Candidates(candidates.ids, candidates.scores, counts, candidates.partial)


def _items_of(value: np.ndarray | pa.Scalar) -> np.ndarray:
    values = value.values if isinstance(value, pa.Scalar) else value
    return np.zeros(0, np.int64) if values is None else ids_of(values, "the seen items")


class ModuleRanker:
    """Ranker that calls a PyTorch module, or a module that Nano optimized.

    Parameters
    ----------
    module : torch.nn.Module
        Takes columns as tensors.
    columns : sequence of str, optional
        Input columns, in order. Default: ``feature_cols`` of the module.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.friesian.models import NCF
    >>> from bigdl.friesian.serving import ModuleRanker
    >>> ranker = ModuleRanker(NCF(10, 20))
    >>> ranker.predict({"user": np.array([1, 1]), "item": np.array([3, 4])}).shape
    (2,)
    """

    def __init__(self, module: torch.nn.Module, columns: Sequence[str] | None = None):
        if columns is None:
            columns = getattr(module, "feature_cols", None)
        if columns is None:
            raise UsageError(
                f"{type(module).__name__} does not declare its columns; pass them in order",
                code="argument-missing",
                argument="columns",
            )
        if hasattr(module, "eval"):
            module.eval()
        self._served = module, list(columns)

    @property
    def columns(self) -> list[str]:
        """Input columns of the model, in order."""
        return self._served[1]

    def swap(self, other: ModuleRanker) -> None:
        """Switch to the model of another ranker; running calls finish with the old model."""
        self._served = other._served

    def predict(self, inputs: dict[str, np.ndarray]) -> Scores:
        """Return a score for each row, or a dict from tasks to scores for a multi-task model."""
        import torch

        module, columns = self._served
        with torch.inference_mode():
            tensors = [torch.from_numpy(_writable(inputs[name])) for name in columns]
            output = module(*tensors)
        if isinstance(output, Mapping):
            return {name: np.asarray(each) for name, each in output.items()}
        return np.asarray(output)


class ServedRanker:
    """Ranker that calls a model of a repository, with batching and hot replacement.

    The repository distributes requests over the versions of the model. Its shadow version gets a
    copy of each request.

    Parameters
    ----------
    repository : ModelRepository
    name : str

    Examples
    --------
    >>> import numpy as np
    >>> import torch
    >>> from bigdl.friesian.models import NCF
    >>> from bigdl.friesian.serving import ServedRanker
    >>> from bigdl.nano.serving import ModelRepository, ServedModel
    >>> repository = ModelRepository()
    >>> sample = torch.tensor([1, 2]), torch.tensor([3, 4])
    >>> _ = repository.add("ncf", ServedModel(NCF(10, 20), sample=sample))
    >>> ranker = ServedRanker(repository, "ncf")
    >>> ranker.columns, ranker.predict({"user": np.array([1, 1]), "item": np.array([3, 4])}).shape
    (['user', 'item'], (2,))
    >>> repository.close()
    """

    def __init__(self, repository: ModelRepository, name: str):
        repository.find(name)
        self._repository, self._name = repository, name

    @property
    def columns(self) -> list[str]:
        """Input columns of the model, in order."""
        return [each.name for each in self._repository.find(self._name).model.signature.inputs]

    @contextmanager
    def leased(self) -> Iterator[ServedModel | None]:
        """Context manager that leases a model version; yields None if there is a shadow model.

        A shadow has to receive the same requests as the model.
        """
        with self._repository.lease(self._name) as deployed:
            has_shadow = self._repository.traffic(self._name).shadow is not None
            yield None if has_shadow else deployed.model

    def predict(
        self,
        inputs: Mapping[str, np.ndarray],
        version: str | None = None,
        timeout: float | None = None,
    ) -> Scores:
        """Return a score for each row, or a dict from tasks to scores for a multi-task model.

        Parameters
        ----------
        inputs : dict of str to ndarray
            Columns that the model does not use are ignored.
        version : str, optional
            Version of the model. By default the repository selects it.
        timeout : float, optional
            Seconds after which a ``DeadlineError`` is raised.
        """
        with self._repository.lease(self._name, version) as deployed:
            model = deployed.model
            signature = model.signature
            if missing := [each.name for each in signature.inputs if each.name not in inputs]:
                raise UsageError(
                    f"The ranker needs {missing}, which the inputs lack",
                    code="column-missing",
                    columns=missing,
                )
            arrays = signature.arrays({each.name: inputs[each.name] for each in signature.inputs})
            self._repository.mirror(deployed, arrays, lambda well: None)
            results = model.call(arrays, timeout)
            return results[0] if len(results) == 1 else model.named(results)


def _writable(array: np.ndarray) -> np.ndarray:
    array = np.ascontiguousarray(array)
    return array if array.flags.writeable else array.copy()
