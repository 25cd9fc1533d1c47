"""Program ``bigdl-friesian-train``, which trains a sequence model on a stream of events.

    bigdl-friesian-train run --config serving.yaml          # until SIGTERM
    bigdl-friesian-train run --config serving.yaml --once   # the available events
    bigdl-friesian-train rollback --config serving.yaml [--version 7]
    bigdl-friesian-train resume --config serving.yaml

The section ``train`` of the configuration names the events, in Kafka or in a folder of Parquet
files, and the model of ``SequenceRecommender.save`` to start from. Each event is trained on exactly
once, also after restarts. After each micro-batch, the changed weights are published to a folder
that ``bigdl-friesian-serve`` follows.
"""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from bigdl.common.checks import check_integer, check_positive
from bigdl.common.errors import BigDLError, UsageError, require
from bigdl.common.timeouts import STREAM_LOOK_S
from bigdl.friesian.serving.config import Config, read_config
from bigdl.friesian.serving.deltas import DeltaFolder
from bigdl.friesian.serving.events import (
    DEFAULT_EVENTS,
    MOST_TIME,
    Event,
    EventStore,
    open_events,
)
from bigdl.orca.learn.streaming import StreamLearner, TrainedBatch, newest_batch, train_stream

require("torch", "orca")

import torch  # noqa: E402

from bigdl.friesian.models.sequences import CausalModel, SavedSequenceModel  # noqa: E402
from bigdl.friesian.models.sequences.saved import SAVED_FACTS, network_of  # noqa: E402

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from bigdl.friesian.models.sequences import SequenceModel

__all__ = ["SequenceLearner", "train"]

logger = logging.getLogger(__name__)

_ESTIMATOR, _ITEMS, _HISTORIES, _STATE = (
    "estimator.pt",
    "items.parquet",
    "histories.parquet",
    "learner.json",
)
_TABLE = "items.table.weight"
_KEPT = 2  # kept events per user, in multiples of max_len
_ROWS_AT_ONCE = 256
_OF_KAFKA = ["topic", "partition", "offset"]


class SequenceLearner(StreamLearner):
    """Sequence model that is trained on arriving events.

    Each event is the target of one update: the model predicts it from the events of its user
    before. New items get new vectors, and those of other items are kept.

    Parameters
    ----------
    folder : str or Path
        Model of ``SequenceRecommender.save``, with the histories of its users.
    loss : str, optional
        Default: the loss of the model, if it was given by name.
    epochs : int, default 1
        Passes over the events of a micro-batch.
    batch_size : int, default 128
    learning_rate : float, default 1e-3
        Of Adam.
    k : int, default 10
        For the metrics NDCG and hit rate.
    user_col, item_col, time_col : str
        Columns of the events.
    events : EventStore, optional
        Receives the events before they are trained on, so that answers use them at once.
    seed : int, default 0

    Examples
    --------
    >>> import pandas as pd
    >>> import pyarrow as pa
    >>> from bigdl.friesian.sequential import SequenceRecommender
    >>> from bigdl.friesian.stream_training import SequenceLearner
    >>> clicks = pd.DataFrame({"user": [1, 1, 1], "item": [5, 8, 9], "time": [1, 2, 3]})
    >>> SequenceRecommender("gru4rec", max_len=4, dim=8, epochs=1).fit(clicks).save("model")
    >>> learner = SequenceLearner("model", loss="softmax")
    >>> metrics = learner.update(pa.table({"user": [1], "item": [77], "time": [4.0]}))
    >>> metrics["targets"], learner.model().items.to_pylist()
    (1, [5, 8, 9, 77])
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        loss: str | None = None,
        epochs: int = 1,
        batch_size: int = 128,
        learning_rate: float = 1e-3,
        k: int = 10,
        user_col: str = "user",
        item_col: str = "item",
        time_col: str = "time",
        events: EventStore | None = None,
        seed: int = 0,
    ):
        saved = SavedSequenceModel.read(folder)
        if not isinstance(saved.network, CausalModel):
            raise UsageError(
                f"{type(saved.network).__name__} cannot be trained on streams, because its "
                "positions depend on later events; use a SASRec, HSTU or GRU4Rec model",
                code="model-unsupported",
                path=str(folder),
            )
        facts = json.loads((Path(folder) / SAVED_FACTS).read_text())
        self.name: str = facts["model"]
        self.options: dict[str, Any] = dict(facts["options"])
        if loss is not None:
            self.options["loss"] = loss
        if "loss" not in self.options:
            raise UsageError(
                f"The model in {str(folder)!r} does not name its loss; pass loss=, such as "
                "'softmax'",
                code="argument-missing",
                argument="loss",
            )
        self.max_len, self.stride = saved.max_len, saved.stride
        self.epochs, self.batch_size = check_positive("epochs", epochs), batch_size
        self.learning_rate, self.k, self.seed = learning_rate, check_positive("k", k), seed
        self.columns = user_col, item_col, time_col
        self.events = events
        self.newest_event: float | None = None
        self.sums = {"targets": 0, "ndcg": 0.0, "hit_rate": 0.0}
        self._items = saved.items
        self._ids = {item: number for number, item in enumerate(saved.items.to_pylist(), 1)}
        self._histories: dict[Any, tuple[list[int], list[float]]] = {}
        rows = pq.read_table(Path(folder) / "history.parquet")
        of_rows = zip(
            *(rows[facts[name]].to_pylist() for name in ("user_col", "item_col", "time_col")),
            strict=True,
        )
        for user, item, time in of_rows:  # ordered by user and time
            ids, times = self._histories.setdefault(user, ([], []))
            ids.append(self._ids[item])
            times.append(float(time))
        for user, (ids, times) in self._histories.items():
            self._histories[user] = ids[-self._most :], times[-self._most :]
        self._use(self._network(saved.network.state_dict()))

    @property
    def _most(self) -> int:
        return _KEPT * self.max_len

    def model(self) -> SavedSequenceModel:
        """Return the current model with its items."""
        network = self._estimator.get_model().eval()
        assert isinstance(network, CausalModel)
        return SavedSequenceModel(network, self._items, self.max_len, self.stride)

    # -- model ------------------------------------------------------------------------------------

    def _network(self, state: Mapping[str, torch.Tensor]) -> SequenceModel:
        facts = {"options": self.options, "max_len": self.max_len}
        network = network_of(self.name, facts, state)
        network.load_state_dict(dict(state))
        return network

    def _use(self, network: SequenceModel) -> None:
        from bigdl.orca.learn.pytorch import Estimator

        self._estimator = Estimator.from_torch(
            model=network,
            optimizer=_adam,
            config={"learning_rate": self.learning_rate},
            backend="local",
        )

    def _add_items(self, new: list[Any]) -> None:
        """Enlarge the model and its optimizer's state by new items."""
        for item in new:
            self._ids[item] = len(self._ids) + 1
        self._items = pa.concat_arrays([self._items, pa.array(new, self._items.type)])
        full = self._estimator.get_state_dict()
        state = full["models"][0]
        count = len(state[_TABLE])
        random = torch.Generator().manual_seed(self.seed + count)
        rows = torch.zeros(len(new), state[_TABLE].shape[1])
        rows.normal_(std=float(state[_TABLE][1:].std()), generator=random)
        state[_TABLE] = torch.cat([state[_TABLE], rows])
        for name in ("items.features", "items.vectors"):
            if state.get(name) is not None:  # new items are as padding: unknown
                state[name] = torch.cat([state[name], state[name][:1].expand(len(new), -1)])
        network = self._network(state)
        names = [name for name, _ in network.named_parameters()]
        for optimizer in full.get("optimizers", []):
            moments = optimizer["state"].get(names.index(_TABLE), {})
            for name, value in moments.items():
                if torch.is_tensor(value) and value.ndim and len(value) == count:
                    more = torch.zeros(len(new), *value.shape[1:], dtype=value.dtype)
                    moments[name] = torch.cat([value, more])
        self._use(network)
        self._estimator.load_state_dict(full)

    # -- training ---------------------------------------------------------------------------------

    def update(self, rows: pa.Table) -> dict[str, float]:
        """Predict the events of a micro-batch, then train on them.

        Parameters
        ----------
        rows : pyarrow.Table
            Columns of users, items and times.

        Returns
        -------
        dict
            ``targets``, and the means of ``ndcg`` and ``hit_rate`` at `k` over them, predicted
            before the update from the user's events until then; ``events``, ``new_items`` and
            ``train_loss``.
        """
        users, items, times = (rows[name].to_pylist() for name in self.columns)
        if self.events is not None:
            self.events.append(_events_of(rows, users, items, times))
        new_items = list(dict.fromkeys(each for each in items if each not in self._ids))
        if new_items:
            self._add_items(new_items)
        times = [float(each) for each in times]
        arriving: dict[Any, list[tuple[float, Any]]] = {}
        for user, item, time in zip(users, items, times, strict=True):
            arriving.setdefault(user, []).append((time, item))
        data = self._windows(arriving)
        self.newest_event = max([*times, *([self.newest_event] if self.newest_event else [])])
        metrics: dict[str, float] = {"events": len(users), "new_items": len(new_items)}
        metrics |= self._predicted(data)
        if not len(data["item_seq"]):
            return metrics
        from bigdl.orca.learn.pytorch.estimator import seed_of_update

        network = self._estimator.get_model()
        assert isinstance(network, CausalModel)
        arrays = [data[name] for name in network.feature_cols]
        trained = self._estimator.fit(
            {"x": arrays if len(arrays) > 1 else arrays[0], "y": data["next_seq"]},
            epochs=self.epochs,
            batch_size=self.batch_size,
            seed=seed_of_update(self._estimator, self.seed),
        )
        return metrics | {"train_loss": float(trained[-1]["train_loss"])}

    def _windows(self, arriving: Mapping[Any, list[tuple[float, Any]]]) -> dict[str, np.ndarray]:
        """Add arriving events to the histories; return the rows whose targets they are."""
        rows: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for user, events in arriving.items():
            ids, times = self._histories.get(user, ([], []))
            old = [(time, each, False) for time, each in zip(times, ids, strict=True)]
            new = [(time, self._ids[item], True) for time, item in events]
            merged = sorted(old + new, key=lambda each: each[0])  # stable at equal times
            is_new = np.array([each[2] for each in merged])
            seq = np.array([each[1] for each in merged], np.int32)
            at = np.array([each[0] for each in merged])
            self._histories[user] = (
                seq[-self._most :].tolist(),
                at[-self._most :].tolist(),
            )
            end = len(seq)
            while end > 1 and is_new[1:end].any():
                start = max(end - self.max_len - 1, 0)
                target = np.where(is_new[start + 1 : end], seq[start + 1 : end], 0)
                if target.any():
                    rows.append((seq[start : end - 1], np.floor(at[start : end - 1]), target))
                end = start + 1
        result = {
            name: np.zeros((len(rows), self.max_len), dtype=dtype)
            for name, dtype in (("item_seq", "i4"), ("time_seq", "i8"), ("next_seq", "i4"))
        }
        for number, columns in enumerate(rows):
            for name, values in zip(result, columns, strict=True):
                result[name][number, : len(values)] = values
        return result

    def _predicted(self, data: Mapping[str, np.ndarray]) -> dict[str, float]:
        """Return metrics of the predictions of the targets by the current model."""
        model = self._estimator.get_model().eval()
        assert isinstance(model, CausalModel)
        ranks = []
        with torch.inference_mode():
            matrix = model.items.matrix()
            for first in range(0, len(data["item_seq"]), _ROWS_AT_ONCE):
                part = slice(first, first + _ROWS_AT_ONCE)
                item_seq = torch.from_numpy(data["item_seq"][part]).long()
                hidden, _ = model.extend(item_seq, torch.from_numpy(data["time_seq"][part]))
                target = torch.from_numpy(data["next_seq"][part]).long()
                for row, at in (target != 0).nonzero().tolist():
                    scores = matrix @ hidden[row, at]
                    wanted = scores[target[row, at]].clone()
                    scores[0] = -torch.inf
                    scores[item_seq[row, : at + 1]] = -torch.inf  # the items before it
                    scores[target[row, at]] = -torch.inf
                    ranks.append(1 + int((scores >= wanted).sum()))
        rank = np.array(ranks, np.int64)
        hits = rank <= self.k
        ndcg = float((hits / np.log2(1 + rank)).sum())
        self.sums["targets"] += len(rank)
        self.sums["ndcg"] += ndcg
        self.sums["hit_rate"] += float(hits.sum())
        if not len(rank):
            return {"targets": 0}
        return {
            "targets": len(rank),
            f"ndcg@{self.k}": ndcg / len(rank),
            f"hit_rate@{self.k}": float(hits.mean()),
            f"mean_ndcg@{self.k}": self.sums["ndcg"] / self.sums["targets"],
        }

    # -- state ------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write model, optimizer, items and histories into a folder."""
        self._estimator.save_checkpoint(str(folder / _ESTIMATOR))
        pq.write_table(pa.table({"item": self._items}), folder / _ITEMS)
        users = list(self._histories)
        columns = {
            "user": users,
            "ids": [self._histories[user][0] for user in users],
            "times": [self._histories[user][1] for user in users],
        }
        pq.write_table(pa.table(columns), folder / _HISTORIES)
        content = {"newest_event": self.newest_event, "sums": self.sums}
        (folder / _STATE).write_text(json.dumps(content), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Read the state that :meth:`save` wrote."""
        state = torch.load(folder / _ESTIMATOR, weights_only=True)
        self._items = pq.read_table(folder / _ITEMS)["item"].combine_chunks()
        self._ids = {item: number for number, item in enumerate(self._items.to_pylist(), 1)}
        rows = pq.read_table(folder / _HISTORIES).to_pylist()
        self._histories = {each["user"]: (each["ids"], each["times"]) for each in rows}
        content = json.loads((folder / _STATE).read_text(encoding="utf-8"))
        self.newest_event, self.sums = content["newest_event"], content["sums"]
        self._use(self._network(state["models"][0]))
        self._estimator.load_checkpoint(str(folder / _ESTIMATOR))


def _adam(model: torch.nn.Module, config: dict) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=config["learning_rate"], betas=(0.9, 0.98))


def _events_of(rows: pa.Table, users: list, items: list, times: list) -> list[Event]:
    """Return events with ids that are equal if a micro-batch is repeated."""
    if set(_OF_KAFKA) <= set(rows.column_names):
        parts = zip(*(rows[name].to_pylist() for name in _OF_KAFKA), strict=True)
        ids = ["-".join(map(str, each)) for each in parts]
    else:
        ids = [
            f"{user}-{item}-{when}" for user, item, when in zip(users, items, times, strict=True)
        ]
    return [
        Event(user, item, float(when), name)
        for user, item, when, name in zip(users, items, times, ids, strict=True)
    ]


# -- program ---------------------------------------------------------------------------------------


def train(config: Config, once: bool = False) -> StreamingQuery:
    """Start the query that a configuration describes, and return it.

    Parameters
    ----------
    config : Config
    once : bool, default False
        Train on the available events, and stop.

    Raises
    ------
    UsageError
        If a key is missing, or something cannot be read.

    Examples
    --------
    >>> from bigdl.friesian.serving.config import read_config
    >>> from bigdl.friesian.stream_training import train
    >>> query = train(read_config("train.yaml"), once=True)  # doctest: +SKIP
    >>> query.awaitTermination()  # doctest: +SKIP
    """
    get = config.get
    needed = {
        name: config.needed(f"train.{name}", "training on a stream")
        for name in ("model", "checkpoint", "publish")
    }
    events = None
    if "history.events" in config.values:
        location = config.get("history.events")
        prefix, most = get("history.prefix", ""), get("history.most", DEFAULT_EVENTS)
        events = config.checked("history.events", open_events, location, prefix, most)
    columns = {f"{name}_col": get(f"train.{name}", name) for name in ("user", "item", "time")}
    learner = config.checked(
        "train.model",
        lambda: SequenceLearner(
            needed["model"],
            loss=get("train.loss"),
            epochs=get("train.epochs", 1),
            batch_size=get("train.batch_size", 128),
            learning_rate=get("train.learning_rate", 1e-3),
            events=events,
            **columns,
        ),
    )
    folder = DeltaFolder(needed["publish"], get("train.full_every", 20))

    def version_of(batch: TrainedBatch | None) -> int:
        return 1 if batch is None else batch.number + 2

    def publish(batch: TrainedBatch | None) -> None:
        number = version_of(batch)
        folder.publish(
            number,
            learner.model(),
            learner.name,
            learner.options,
            newest_event=learner.newest_event,
        )
        if batch is not None:
            shown = {name: round(value, 4) for name, value in batch.metrics.items()}
            print(f"version {number}: {json.dumps(shown)}", flush=True)

    newest = config.checked("train.checkpoint", newest_batch, needed["checkpoint"])
    expected = version_of(newest)
    if (published := max(folder.versions(), default=0)) > expected:
        raise config.error(
            "train.publish",
            f"the versions in {needed['publish']}, up to {published}, are newer than the "
            f"checkpoint, which continues at {expected}; choose an empty folder",
        )
    if newest is None and not folder.versions():
        publish(None)
    return train_stream(
        _stream_of(config, list(columns.values())),
        learner,
        needed["checkpoint"],
        trigger_s=None if once else get("train.interval_s", 1.0),
        available_now=once,
        on_commit=publish,
    )


def _stream_of(config: Config, columns: list[str]) -> DataFrame:
    from pyspark.sql import functions as F

    from bigdl.orca.cluster.connect import active_spark

    user, item, time = columns
    most = config.get("train.most_rows")
    if ("train.kafka" in config.values) == ("train.files" in config.values):
        raise config.error("train.kafka", "pass either kafka and topic, or files")
    schema = f"`{user}` BIGINT, `{item}` BIGINT, `{time}` DOUBLE"
    if "train.kafka" in config.values:
        from bigdl.orca.data.kafka import read_kafka

        topic = config.needed("train.topic", "events of Kafka")
        records = config.checked(
            "train.kafka",
            lambda: read_kafka(config.get("train.kafka"), topic, most_records=most),
        )
        values = F.from_json(F.col("value").cast("string"), schema)
        rows = records.select(*_OF_KAFKA, values.alias("event")).select(*_OF_KAFKA, "event.*")
    else:
        spark = active_spark().spark
        folder = config.get("train.files")
        if not any(Path(folder).glob("*.parquet")):
            raise config.error("train.files", f"{folder} has no Parquet file yet")
        files_schema = spark.read.parquet(folder).schema
        known = files_schema.fieldNames()
        if missing := [name for name in columns if name not in known]:
            raise config.error("train.files", f"the files have no columns {missing}, only {known}")
        reader = spark.readStream.schema(files_schema)
        if most is not None:
            reader = reader.option("maxFilesPerTrigger", check_integer("most_rows", most, 1))
        rows = reader.parquet(folder).select(
            F.col(user).cast("bigint").alias(user),
            F.col(item).cast("bigint").alias(item),
            F.col(time).cast("double").alias(time),
        )
    is_complete = " AND ".join(f"`{name}` IS NOT NULL" for name in columns)
    # Spark orders NaN after all numbers, so this also excludes NaN.
    return rows.filter(f"{is_complete} AND abs(`{time}`) < {MOST_TIME:g}")


def _run(config: Config, options: argparse.Namespace) -> int:
    from bigdl.orca import init_orca_context, stop_orca_context

    ending = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ending.set())
    init_orca_context("local", cores=config.get("train.cores", 2))
    try:
        query = train(config, options.once)
        print("ready", flush=True)
        while query.isActive and not ending.wait(STREAM_LOOK_S):
            pass
        if query.isActive:
            query.stop()
        error = query.exception()
        if error is not None:
            print(f"bigdl-friesian-train: {error}", file=sys.stderr)
            return 1
    finally:
        stop_orca_context()
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="bigdl-friesian-train",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("run", "train on the events as they arrive"),
        ("rollback", "make servers use an earlier version"),
        ("resume", "make servers use the newest version again"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--config", "-c", required=True, help="YAML configuration file")
        if name == "run":
            command.add_argument("--once", action="store_true", help="stop after available events")
        if name == "rollback":
            command.add_argument("--version", type=int, help="default: the one before")
    options = parser.parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    try:
        config = read_config(options.config)
        if options.command == "run":
            return _run(config, options)
        folder = DeltaFolder(config.needed("train.publish", options.command))
        if options.command == "rollback":
            print(f"version {folder.rollback(options.version)}")
        else:
            folder.resume()
            print(f"version {max(folder.versions(), default=0)}")
    except BigDLError as error:
        print(f"bigdl-friesian-train: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
