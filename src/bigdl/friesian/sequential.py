"""Recommender with a sequence model: from interactions to recommended items.

:class:`SequenceRecommender` trains a model of :mod:`bigdl.friesian.models.sequences` with an
Orca Estimator and has the methods of the :mod:`bigdl.friesian.baselines`, so that
``cross_validate`` compares them.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bigdl.common.checks import check_integer, check_positive
from bigdl.common.errors import UsageError, hide_frames, require
from bigdl.friesian.baselines import History, HistoryRecommender, best_columns
from bigdl.friesian.feature.sequences import SequenceTable, sequence_schema
from bigdl.friesian.metrics.ranking import DEFAULT_METRICS, RankingMetrics, ranking_metrics
from bigdl.friesian.metrics.tables import Table, as_arrow, column_names, ids, index_in

require("torch", "orca")

import torch  # noqa: E402

from bigdl.friesian.models import sequences as sequence_models  # noqa: E402
from bigdl.friesian.models.sequences import SavedSequenceModel, SequenceModel  # noqa: E402
from bigdl.friesian.models.sequences.saved import (  # noqa: E402
    SAVED_FACTS,
    SAVED_WEIGHTS,
    SEQUENCE_MODELS,
    window_start,
)

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql import DataFrame

    from bigdl.friesian.ops.schema import FeatureSchema
    from bigdl.orca.learn.pytorch.estimator import PyTorchEstimator

__all__ = ["SequenceRecommender"]

_ROWS_AT_ONCE = 256


@hide_frames
class SequenceRecommender(HistoryRecommender):
    """Recommender that predicts the next item of a user with a sequence model.

    An Orca Estimator trains the model on any backend. The histories that :meth:`recommend` needs
    are kept in the memory of the driver; to score more users, call ``predict`` of an Estimator on
    ``SequenceTable.histories``.

    Parameters
    ----------
    model : str or callable, default "sasrec"
        ``"sasrec"``, ``"hstu"``, ``"gru4rec"``, ``"bert4rec"``, or a function of a FeatureSchema
        that returns a SequenceModel.
    max_len : int, default 50
        Length of the histories that the model reads.
    windows : {"last", "all"}, default "last"
        As in ``FeatureTable.sequences``.
    epochs : int, default 50
    stride : int, default 1
        Recommendations read the newest `max_len` to ``max_len - stride + 1`` events: the window of
        a longer history moves by this number of events. With a larger stride, a server computes
        only the new events of a long history; with 1, it reads the window again after each event.
    batch_size : int, default 128
        Number of sequences per update, over all workers.
    learning_rate : float, default 1e-3
        Of Adam.
    optimizer : callable, optional
        ``optimizer(model, config)`` that returns an optimizer, instead of Adam.
    backend : str, default "local"
        Backend of the Estimator. Interactions of a SequenceTable stay in Spark with ``"spark"``,
        ``"ray"``, ``"horovod"`` and ``"bigdl"``.
    workers_per_node : int, default 1
    model_dir : str, optional
        Folder for checkpoints, as in ``Estimator.from_torch``.
    item_features : table, optional
        The item column and categorical columns, whose embeddings are added to the items' vectors.
    item_vectors : table, optional
        The item column and a column ``vector`` with lists of numbers, such as the embedding of a
        text or an image.
    seed : int, default 0
    user_col, item_col, time_col : str
        Columns of the interactions. At equal times, the events of a user are ordered by item.
    **options
        Other arguments of the model, such as ``dim`` and ``loss``.

    Attributes
    ----------
    epoch_metrics : list of dict
        Metrics of each epoch of the last training, as ``Estimator.fit`` returns them.

    Examples
    --------
    >>> import pandas as pd
    >>> from bigdl.friesian.sequential import SequenceRecommender
    >>> rows = [(user, (user + time) % 5, time) for user in range(20) for time in range(4)]
    >>> clicks = pd.DataFrame(rows, columns=["user", "item", "time"])
    >>> model = SequenceRecommender("gru4rec", max_len=4, dim=16, epochs=40, learning_rate=0.02)
    >>> model.fit(clicks).recommend([0], k=1)["item"].tolist()  # after 0, 1, 2, 3
    [4]
    """

    _needs_time = True

    def __init__(
        self,
        model: str | Callable[[FeatureSchema], SequenceModel] = "sasrec",
        *,
        max_len: int = 50,
        windows: str = "last",
        stride: int = 1,
        epochs: int = 50,
        batch_size: int = 128,
        learning_rate: float = 1e-3,
        optimizer: Callable[[torch.nn.Module, dict], torch.optim.Optimizer] | None = None,
        backend: str = "local",
        workers_per_node: int = 1,
        model_dir: str | None = None,
        item_features: Table | None = None,
        item_vectors: Table | None = None,
        seed: int = 0,
        user_col: str = "user",
        item_col: str = "item",
        time_col: str = "time",
        **options: object,
    ):
        super().__init__(user_col, item_col, time_col)
        if isinstance(model, str) and model not in SEQUENCE_MODELS:
            raise UsageError(
                f"model should be one of {list(SEQUENCE_MODELS)} or a function of a schema, got "
                f"{model!r}",
                code="argument-value",
                argument="model",
                allowed=list(SEQUENCE_MODELS),
            )
        if not isinstance(model, str) and (options or not callable(model)):
            raise UsageError(
                f"model={model!r} should be a function of a schema, which sets the options of the "
                f"model itself; got the options {list(options)}",
                code="argument-conflict",
                argument="model",
            )
        if isinstance(model, str):
            _check_options(getattr(sequence_models, SEQUENCE_MODELS[model]), options)
        self.model, self.options = model, options
        self.max_len, self.windows = check_positive("max_len", max_len), windows
        self.stride = check_integer("stride", stride, 1, self.max_len)
        self.epochs, self.batch_size = check_positive("epochs", epochs), batch_size
        self.learning_rate, self.optimizer = learning_rate, optimizer
        self.backend, self.workers_per_node = backend, workers_per_node
        self.model_dir, self.seed = model_dir, seed
        self.item_features, self.item_vectors = item_features, item_vectors
        self._network: SequenceModel | None = None

    # -- training ------------------------------------------------------------------------------

    def fit(self, table: Table | SequenceTable) -> Self:
        """Train on interactions, or on their sequences.

        Parameters
        ----------
        table : pandas, Arrow, Polars or Spark table, FeatureTable, or SequenceTable
            Tables are collected to the driver. The training rows of a SequenceTable are not.

        Returns
        -------
        This object.

        Raises
        ------
        UsageError
            If there are no rows, or no user has two events.
        """
        if not isinstance(table, SequenceTable):
            return super().fit(table)
        history = _collected(table)
        self.max_len = table.max_len
        self.user_col, self.item_col = table.user_col, table.item_col
        self._network = self._new_network(history)
        self._train(table.df, self.epochs)
        self._history = history
        return self

    def fit_partial(self, table: Table, epochs: int = 1) -> Self:
        """Continue the training with new interactions.

        They are added to the histories, and the users who have them are trained. New items get new
        vectors; those of other items are kept.

        Parameters
        ----------
        table : pandas, Arrow, Polars or Spark table, or FeatureTable
            New interactions.
        epochs : int, default 1

        Returns
        -------
        This object.

        Raises
        ------
        UsageError
            Before :meth:`fit`.
        """
        old, network = self._trained()
        columns = [self.user_col, self.item_col, self.time_col]
        added = History.of(table, *columns)
        history = old.joined(added)
        self._network = self._new_network(history)
        _copy_weights(network, self._network, index_in(old.items, history.items))
        users = index_in(added.users, history.users)
        self._train(self._windows(history, users), epochs)
        self._history = history
        return self

    def _learn(self, history: History) -> None:
        self._network = self._new_network(history)
        self._train(self._windows(history, np.arange(len(history.users))), self.epochs)

    def _new_network(self, history: History) -> SequenceModel:
        schema = sequence_schema(len(history.items), self.max_len)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            if not isinstance(self.model, str):
                return self.model(schema)
            options = dict(self.options)
            if self.item_features is not None:
                codes, sizes = self._features(history.items)
                options |= {"item_features": codes, "item_feature_sizes": sizes}
            if self.item_vectors is not None:
                options["item_vectors"] = self._vectors(history.items)
            made: SequenceModel = getattr(sequence_models, SEQUENCE_MODELS[self.model]).from_schema(
                schema, **options
            )
            return made

    def _features(self, items: pa.Array) -> tuple[np.ndarray, list[int]]:
        names = [each for each in column_names(self.item_features) if each != self.item_col]
        table = as_arrow(self.item_features, "item_features", [self.item_col, *names])
        rows = index_in(ids(table, self.item_col, "item_features"), items)
        codes = np.zeros((len(items) + 2, len(names)), dtype=np.int64)
        sizes: list[int] = []
        for number, name in enumerate(names):
            values = pc.dictionary_encode(table[name]).unify_dictionaries().combine_chunks()
            codes[rows + 1, number] = np.asarray(pc.fill_null(values.indices, -1)) + 1
            sizes.append(len(values.dictionary) + 1)
        return codes[:-1], sizes

    def _vectors(self, items: pa.Array) -> np.ndarray:
        table = as_arrow(self.item_vectors, "item_vectors", [self.item_col, "vector"])
        rows = index_in(ids(table, self.item_col, "item_vectors"), items)
        values = np.stack(table["vector"].to_pylist()).astype(np.float32)
        result = np.zeros((len(items) + 2, values.shape[1]), dtype=np.float32)
        result[rows + 1] = values
        return result[:-1]

    def _train(self, data: dict[str, np.ndarray] | DataFrame, epochs: int) -> None:
        network = self._network
        assert network is not None
        estimator = self.estimator(network)
        inputs: object = data
        names: tuple[list[str] | None, ...] = (network.feature_cols, network.label_cols)
        if isinstance(data, dict):
            arrays = [data[each] for each in network.feature_cols]
            inputs = {"x": arrays if len(arrays) > 1 else arrays[0], "y": data["next_seq"]}
            names = None, None
        self.epoch_metrics = estimator.fit(
            inputs,
            epochs=epochs,
            batch_size=self.batch_size,
            seed=self.seed,
            feature_cols=names[0],
            label_cols=names[1],
        )
        trained = estimator.get_model()
        assert isinstance(trained, SequenceModel)
        self._network = trained.eval()

    def estimator(self, network: SequenceModel) -> PyTorchEstimator:
        """Create the Estimator that trains a model with the options of this recommender.

        Parameters
        ----------
        network : SequenceModel

        Returns
        -------
        PyTorchEstimator
        """
        from bigdl.orca.learn.pytorch import Estimator

        return Estimator.from_torch(
            model=network,
            optimizer=self.optimizer or _adam,
            config={"learning_rate": self.learning_rate},
            backend=self.backend,
            workers_per_node=self.workers_per_node,
            model_dir=self.model_dir,
        )

    def _windows(self, history: History, users: np.ndarray) -> dict[str, np.ndarray]:
        """Return the training rows of users, as those of a SequenceTable."""
        rows = []
        for user in users:
            first, end = history.starts[user], history.starts[user + 1]
            while end - first > 1:
                start = max(end - self.max_len - 1, first)
                rows.append((start, end))
                if self.windows == "last":
                    break
                end = start + 1
        if not rows:
            raise UsageError(
                "No user has two events, so there is no next item to train on", code="data-empty"
            )
        result = {
            name: np.zeros((len(rows), self.max_len), dtype=dtype)
            for name, dtype in (("item_seq", "i4"), ("time_seq", "i8"), ("next_seq", "i4"))
        }
        for number, (start, end) in enumerate(rows):
            length = end - start - 1
            result["item_seq"][number, :length] = history.item[start : end - 1] + 1
            result["time_seq"][number, :length] = np.floor(history.time[start : end - 1])
            result["next_seq"][number, :length] = history.item[start + 1 : end] + 1
        return result

    # -- recommendations -----------------------------------------------------------------------

    @property
    def network(self) -> SequenceModel:
        """Trained model."""
        return self._trained()[1]

    def _trained(self) -> tuple[History, SequenceModel]:
        if self._history is None or self._network is None:
            raise UsageError("Call fit first", code="not-fitted")
        return self._history, self._network

    def _scores(self, history: History, users: np.ndarray) -> np.ndarray:
        network, length = self._network, self.max_len
        assert network is not None
        item = np.zeros((len(users), length), dtype=np.int64)
        time = np.zeros((len(users), length), dtype=np.int64)
        for row, user in enumerate(users):
            first, end = history.starts[user], history.starts[user + 1]
            start = first + window_start(int(end - first), length, self.stride)
            item[row, : end - start] = history.item[start:end] + 1
            time[row, : end - start] = np.floor(history.time[start:end])
        parts = []
        with torch.inference_mode():
            matrix = network.items.matrix()[1:].T
            for first in range(0, len(users), _ROWS_AT_ONCE):
                part = slice(first, first + _ROWS_AT_ONCE)
                columns = [torch.from_numpy(item[part])]
                if network.uses_times:
                    columns.append(torch.from_numpy(time[part]))
                parts.append((network(*columns) @ matrix).numpy())
        return np.concatenate(parts).astype(np.float64)

    def recommend_to_items(
        self,
        target_items: Iterable[Any],
        k: int = 10,
        *,
        filter_itself: bool = True,
        items: Iterable[Any] | None = None,
    ) -> pd.DataFrame:
        """Recommend items that are similar to items, by the cosine of their vectors.

        Parameters
        ----------
        target_items : iterable of ids
            Items of :meth:`fit`.
        k : int, default 10
        filter_itself : bool, default True
            Leave out the target item.
        items : iterable of ids, optional
            Recommend only these items.

        Returns
        -------
        pandas.DataFrame
            Columns ``target_item``, the item column, ``score`` and ``rank`` from 1.

        Raises
        ------
        UsageError
            Before :meth:`fit`, and for unknown target items.
        """
        import pandas as pd

        history, network = self._trained()
        check_positive("k", k)
        targets = pa.array(list(target_items))
        known = index_in(targets.cast(history.items.type), history.items)
        if (known == len(history.items)).any():
            unknown = targets.filter(pa.array(known == len(history.items))).to_pylist()
            raise UsageError(
                f"The items {unknown[:5]} have no events in fit; leave them out",
                code="name-unknown",
                argument="target_items",
            )
        with torch.inference_mode():
            matrix = torch.nn.functional.normalize(network.items.matrix()[1:], dim=1)
            scores = (matrix[torch.from_numpy(known)] @ matrix.T).numpy().astype(np.float64)
        if items is not None:
            allowed = pa.array(list(items)).cast(history.items.type)
            scores[:, ~np.asarray(pc.is_in(history.items, value_set=allowed))] = -np.inf
        if filter_itself:
            scores[np.arange(len(known)), known] = -np.inf
        top = best_columns(scores, k)
        chosen = np.take_along_axis(scores, top, axis=1)
        row, column = np.nonzero(chosen > -np.inf)
        return pd.DataFrame(
            {
                "target_item": targets.take(pa.array(row)).to_pandas(),
                self.item_col: history.items.take(pa.array(top[row, column])).to_pandas(),
                "score": chosen[row, column],
                "rank": column + 1,
            }
        )

    def evaluate(
        self,
        truth: Table,
        metrics: Sequence[str] | str = DEFAULT_METRICS,
        k: Sequence[int] | int = 10,
        *,
        filter_seen: bool = True,
    ) -> RankingMetrics:
        """Return ranking metrics of the recommendations to the users of a table.

        Parameters
        ----------
        truth : table with the user and item columns
            Interactions after those of :meth:`fit`.
        metrics, k
            As in :func:`~bigdl.friesian.metrics.ranking_metrics`.
        filter_seen : bool, default True

        Returns
        -------
        RankingMetrics
            A dict from names such as ``"ndcg@10"`` to float. Every item is ranked.
        """
        rows = as_arrow(truth, "truth", [self.user_col, self.item_col])
        most = k if isinstance(k, int) else max(k)
        users = pc.unique(ids(rows, self.user_col, "truth"))
        lists = self.recommend(users, most, filter_seen=filter_seen)
        history, _ = self._trained()
        return ranking_metrics(
            lists,
            rows,
            metrics,
            k,
            train=history.table(self.user_col, self.item_col),
            user_col=self.user_col,
            item_col=self.item_col,
        )

    # -- files ---------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the trained model and the histories to a folder.

        Parameters
        ----------
        path : str or Path
            New or empty folder. The files contain no code.

        Raises
        ------
        UsageError
            Before :meth:`fit`, and if the folder has files.
        """
        import pyarrow.parquet as pq

        history, network = self._trained()
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(
                f"The folder {str(folder)!r} is not empty; choose another one",
                code="path-exists",
                path=str(folder),
            )
        names = {"user_col": self.user_col, "item_col": self.item_col, "time_col": self.time_col}
        pq.write_table(
            history.table(self.user_col, self.item_col, self.time_col), folder / "history.parquet"
        )
        name = self.model if isinstance(self.model, str) else None
        saved = SavedSequenceModel(network, history.items, self.max_len, self.stride)
        saved.write(folder, name, self.options, names)

    def load(self, path: str | Path) -> Self:
        """Load a folder that :meth:`save` wrote, with the same arguments of the class.

        Parameters
        ----------
        path : str or Path

        Returns
        -------
        This object.

        Raises
        ------
        UsageError
            If the folder is incomplete, or its weights do not fit the arguments of the class.
        """
        import pyarrow.parquet as pq

        folder = Path(path)
        try:
            facts = json.loads((folder / SAVED_FACTS).read_text())
            state = torch.load(folder / SAVED_WEIGHTS, weights_only=True)
            rows = pq.read_table(folder / "history.parquet")
        except FileNotFoundError as error:
            raise UsageError(
                f"{str(folder)!r} has no saved recommender ({error}); pass a folder that save "
                "wrote",
                code="path-missing",
                path=str(folder),
            ) from None
        self.max_len, self.stride = facts["max_len"], facts.get("stride", 1)
        self.user_col, self.item_col = facts["user_col"], facts["item_col"]
        self.time_col = facts["time_col"]
        history = History.of(rows, self.user_col, self.item_col, self.time_col)
        network = self._new_network(history)
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            raise UsageError(
                f"The weights in {str(folder)!r} do not fit the arguments of this recommender; "
                f"create it as when it was saved ({error})",
                code="model-mismatch",
                path=str(folder),
            ) from None
        self._history, self._network = history, network.eval()
        return self


def _check_options(model: type[SequenceModel], options: Iterable[str]) -> None:
    """Raise an error for the first option that is not an argument of a model class."""
    known: set[str] = set()
    for each in model.__mro__:
        if issubclass(each, SequenceModel):
            known |= set(inspect.signature(each.__init__).parameters)
    allowed = sorted(known - {"self", "items", "max_len", "item_col", "options"})
    for name in options:
        if name not in allowed:
            raise UsageError(
                f"{model.__name__} has no option {name!r}; its options are {allowed}",
                code="argument-unknown",
                argument=name,
                allowed=allowed,
            )


def _adam(model: torch.nn.Module, config: dict) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=config["learning_rate"], betas=(0.9, 0.98))


def _collected(table: SequenceTable) -> History:
    """Return the newest events of all users, after the older items of each one."""
    columns = [table.user_col, "item_seq", "time_seq", "seen"]
    rows = as_arrow(table.histories, "histories", columns).combine_chunks()
    users = ids(rows, table.user_col, "histories").combine_chunks()
    order = np.asarray(pc.sort_indices(users))
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for row in order:
        item = np.asarray(rows["item_seq"][int(row)].values)
        time = np.asarray(rows["time_seq"][int(row)].values)[item > 0]
        item = item[item > 0]
        seen = np.asarray(rows["seen"][int(row)].values)
        older = np.setdiff1d(seen, item)
        item = np.concatenate([older, item]) - 1
        parts.append((item, np.concatenate([np.full(len(older), time[0] - 1), time])))
    counts = [len(item) for item, _ in parts]
    return History(
        users.take(pa.array(order)),
        table.items,
        np.concatenate([item for item, _ in parts]),
        np.concatenate([time for _, time in parts]).astype(np.float64),
        np.append(0, np.cumsum(counts)),
    )


def _copy_weights(old: SequenceModel, new: SequenceModel, ids_of_old: np.ndarray) -> None:
    """Copy weights; the rows of item tables move to the items' new ids."""
    if new.items.embedding != "dense":
        raise UsageError(
            f"fit_partial needs embedding='dense', got {new.items.embedding!r}; train an Estimator "
            "further instead",
            code="unsupported",
            argument="embedding",
        )
    rows = torch.cat([torch.zeros(1, dtype=torch.int64), torch.from_numpy(ids_of_old) + 1])
    state, values = new.state_dict(), old.state_dict()
    for name, value in values.items():
        if name == "items.table.weight":
            state[name][rows] = value
        elif name not in ("items.features", "items.vectors") and state[name].shape == value.shape:
            state[name].copy_(value)
    new.load_state_dict(state)
