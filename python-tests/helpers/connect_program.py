"""Programs for a classic Spark and for Spark Connect: only ``init_orca_context`` differs.

Run as ``connect_program.py NAME URL FOLDER``, where URL is ``local`` for a classic Spark.
"""

import json
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parent))

import faults  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context  # noqa: E402
from bigdl.orca.learn.pytorch import Estimator  # noqa: E402
from bigdl.orca.learn.trigger import SeveralIteration  # noqa: E402

URL, FOLDER = sys.argv[2], Path(sys.argv[3])


def start():
    if URL == "local":
        init_orca_context("local", cores=2)
    else:
        init_orca_context("spark-connect", master=URL)
    return OrcaContext.get_spark_session()


def train():
    """Weights, figures and predictions of an input with uneven and empty partitions."""
    spark = start()
    rows = spark.range(0, 700, 1, 7).where("id < 100 or id >= 237 and id % 3 > 0")
    frame = rows.selectExpr("id", "array(sin(id), cos(id)) as x", "double(id % 5) as y")
    losses = []

    def model(config):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    est = Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=0.01),
        loss=torch.nn.MSELoss(),
        metrics=["mse"],
        workers_per_node=2,
        model_dir=str(FOLDER / "model"),
    )
    columns = {"feature_cols": ["x"], "label_cols": ["y"]}
    figures = est.fit(frame, epochs=2, batch_size=32, seed=3, validation_data=frame, **columns)
    losses += [{k: v for k, v in epoch.items() if "loss" in k or "mse" in k} for epoch in figures]
    losses.append(est.evaluate(frame, batch_size=32, **columns))
    est.save(str(FOLDER / "saved"))
    est.load(str(FOLDER / "saved"))
    predicted = est.predict(frame, feature_cols=["x"])
    assert predicted.columns == ["id", "x", "y", "prediction"]
    arrays = est.predict(np.ones((5, 2), np.float32))
    weights = [value.numpy().tobytes() for value in est.get_model().state_dict().values()]
    rows = [tuple(row) for row in predicted.collect()]
    (FOLDER / "result").write_bytes(pickle.dumps((weights, losses, rows, arrays.tobytes())))


def shards():
    """What XShards, readers and transformers give."""
    import pandas as pd

    from bigdl.orca.data import SharedValue, XShards
    from bigdl.orca.data.pandas import read_csv
    from bigdl.orca.data.transformer import MinMaxScaler, StringIndexer

    start()
    (FOLDER / "csv").mkdir()
    for part in range(2):
        frame = pd.DataFrame({"a": [3 + part, 1, 2], "b": list("xyz"), "c": [0.5, 1.5, part]})
        frame.to_csv(FOLDER / "csv" / f"{part}.csv", index=False)
    arrays = XShards.partition({"x": np.arange(10.0), "y": np.arange(10)}, 4)
    read = read_csv(str(FOLDER / "csv"))
    doubled = arrays.transform_shard(lambda shard, by: {**shard, "x": shard["x"] * by}, 2)
    told = arrays.transform_shard(lambda shard, value: value[len(shard["x"])], SharedValue("abcd"))
    pairs = arrays.transform_shard(lambda shard: (shard["x"], shard["y"]))
    index = StringIndexer(inputCol="b")
    found = {
        "sizes": (arrays.num_partitions(), len(arrays), len(read), read.num_partitions()),
        "arrays": arrays.collect(),
        "doubled": doubled.collect(),
        "told": told.collect(),
        "zipped": arrays.zip(doubled).collect(),
        "split": [part.collect() for part in pairs.split()],
        "repartitioned": [arrays.repartition(n).collect() for n in (1, 3)],
        "first": (arrays.first(), arrays.take(3), arrays["x"].first()),
        "read": read.collect(),
        "by b": read.partition_by("b", 2).collect(),
        "frame": sorted(map(tuple, read.to_spark_df().collect())),
        "sorted": pd.concat(read.sort_values("c").collect(), ignore_index=True),
        "unique": sorted(read["b"].unique()),
        "sums": sorted(
            row
            for part in read.group_by("b", {"a": "sum"}).collect()
            for row in part.to_numpy().tolist()
        ),
        "scaled": MinMaxScaler(inputCol=["a"], outputCol="s").fit_transform(read).collect(),
        "indexed": sorted(
            row for part in index.fit_transform(read).collect() for row in part.to_numpy().tolist()
        ),
    }
    try:
        arrays.transform_shard(lambda shard: 1 / 0)
    except Exception as error:
        found["error"] = f"{type(error).__name__}: {error}"
    (FOLDER / "result").write_bytes(pickle.dumps(found))


def tables():
    """What tables, pipelines and a stage of Spark ML give."""
    from pyspark.ml import Pipeline

    from bigdl.dllib.nnframes import NNEstimator, NNModel
    from bigdl.friesian.feature import FeaturePipeline, FeatureTable

    spark = start()
    rows = [(1, "a", 1.0, 10), (2, "b", 2.0, 20), (1, "a", None, 30), (3, "c", 5.0, 40)]
    table = FeatureTable(
        spark.createDataFrame(rows, "user int, item string, price double, time int")
    )
    filled = table.fillna(0.0, "price")
    (index,) = table.gen_string_idx(["item"], freq_limit=1)
    pipeline = FeaturePipeline().fillna(0.0, "price").fit(table)
    made = {
        "encoded": table.encode_string(["item"], [index]),
        "history": table.add_hist_seq(["time"], "user", "time", min_len=1, max_len=3),
        "applied": filled.apply("price", "twice", lambda price: price * 2, "double"),
        "scaled": filled.min_max_scale("price")[0],
        "target": filled.target_encode("item", "price")[0],
        "pipeline": pipeline.transform(table),
    }
    found = {name: sorted(map(str, each.df.collect())) for name, each in made.items()}
    torch.manual_seed(0)
    stage = NNEstimator(torch.nn.Linear(1, 1), torch.nn.MSELoss())
    stage.setBatchSize(16).setMaxEpoch(2).setSeed(3)
    frame = spark.range(0, 64, 1, 2).selectExpr("array(float(id / 64)) features", "float(id) label")
    model = Pipeline(stages=[stage]).fit(frame)
    found["stage"] = [row.prediction for row in model.transform(frame).collect()]
    model.stages[0].save(str(FOLDER / "stage"))
    loaded = NNModel.load(str(FOLDER / "stage"))
    found["loaded"] = [row.prediction for row in loaded.transform(frame).collect()]
    (FOLDER / "result").write_bytes(pickle.dumps(found))


def same_bits():
    """Digests of the weights of ``exact="bits"`` by 1, 2 and 4 workers, for the models named."""
    from same_bits_models import MODELS, fitted, random_rows

    start()
    rows = random_rows()
    digests = {
        name: [fitted(rows, MODELS[name], workers, backend="spark") for workers in (1, 2, 4)]
        for name in sys.argv[4:]
    }
    (FOLDER / "result").write_text(json.dumps(digests))


def restarted():
    """A fit whose server is killed, and another one that goes on."""

    def fit(**options):
        est = faults.estimator(model_dir=str(FOLDER / "model"))
        stop = Stop(FOLDER / "marker", 0, 17)
        trigger = SeveralIteration(5)
        data = faults.frame(OrcaContext.get_spark_session())
        return faults.fit(est, data, stop, checkpoint_trigger=trigger, **options)

    class Stop(faults.Once):
        def act(self, runner):
            time.sleep(60)

    start()
    try:
        fit()
    except Exception as error:
        (FOLDER / "error").write_text(f"{type(error).__name__}: {error}")
    while not (FOLDER / "again").exists():
        time.sleep(0.1)
    start()
    (FOLDER / "result").write_text(json.dumps(fit(resume="auto")))


def where_modules_are():
    """The file of a module of BigDL in the workers."""
    from bigdl.orca.engine import ConnectEngine

    start()

    def program(worker):
        import bigdl.runtime.task

        return bigdl.runtime.task.__file__

    (FOLDER / "result").write_text(json.dumps(ConnectEngine().run(program, num_workers=2)))


def interrupted():
    """Ctrl-C while workers wait in a collective that never ends."""
    from bigdl.orca.engine import ConnectEngine

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background ignores it
    start()

    def program(worker):
        (FOLDER / f"pid-{worker.rank}").write_text(str(os.getpid()))
        time.sleep(600)

    def press():
        while len(list(FOLDER.glob("pid-*"))) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    for rendezvous in ("driver", "rank0"):
        for file in FOLDER.glob("pid-*"):
            file.unlink()
        threading.Thread(target=press, daemon=True).start()
        try:
            ConnectEngine(rendezvous=rendezvous).run(program, num_workers=2)
        except KeyboardInterrupt:
            pids = [int(file.read_text()) for file in FOLDER.glob("pid-*")]
            (FOLDER / f"interrupted-{rendezvous}").write_text(json.dumps(pids))


if __name__ == "__main__":
    {
        each.__name__: each
        for each in (train, shards, tables, same_bits, restarted, interrupted, where_modules_are)
    }[sys.argv[1]]()
    stop_orca_context()
