"""Neural collaborative filtering in Keras: train, resume from a checkpoint, predict.

    python examples/orca/keras/ncf_keras.py --data-dir ml-100k --input dataframe

Ratings are MovieLens' ``u.data``, or generated without ``--data-dir``. The model learns to
distinguish rated items from random negatives, which are drawn by a Spark SQL plan if the input is a
DataFrame, or by a pandas function on every shard if it is XShards.
"""

import argparse
import os
import tempfile

import numpy as np
import pandas as pd

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.data.pandas import read_csv
from bigdl.orca.learn.tf2 import Estimator

FEATURES, LABELS = ["user", "item"], ["label"]


def model_creator(config):
    """Return NCF with a product and an MLP of embeddings (He et al., WWW 2017)."""
    import keras
    from keras import layers

    user, item = (keras.Input((), dtype="int32", name=name) for name in FEATURES)
    factors = config["factors"]

    def tables(width):
        users = layers.Embedding(config["users"], width)(user)
        return [users, layers.Embedding(config["items"], width)(item)]

    product = layers.Multiply()(tables(factors))
    hidden = layers.Concatenate()(tables(2 * factors))
    for width in (2 * factors, factors):
        hidden = layers.Dense(width, activation="relu")(hidden)
    chance = layers.Dense(1, activation="sigmoid")(layers.Concatenate()([product, hidden]))
    model = keras.Model({"user": user, "item": item}, chance)
    model.compile(
        keras.optimizers.Adam(config["lr"]), "binary_crossentropy", metrics=["accuracy", "AUC"]
    )
    return model


# -- the data ------------------------------------------------------------------------------------


def write_ratings(path, users=60, items=40, seed=0):
    """Write generated ratings in the format of MovieLens; similar users give similar ratings."""
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=(users, 3)) @ rng.normal(size=(3, items))
    chosen = np.argsort(-taste + rng.gumbel(size=taste.shape) / 3)[:, : items // 3]
    lines = [f"{u + 1}\t{i + 1}\t5\t0\n" for u in range(users) for i in sorted(chosen[u])]
    with open(path, "w") as file:
        file.writelines(lines)


def frame_with_negatives(path, negatives, seed):
    """Return a Spark DataFrame of ``user``, ``item`` and ``label``."""
    from pyspark.sql import functions as F

    spark = OrcaContext.get_spark_session()
    schema = "user INT, item INT, rating DOUBLE, time LONG"
    chosen = spark.read.csv(path, sep="\t", schema=schema).select("user", "item").distinct()
    items = chosen.agg(F.max("item")).first()[0]
    number = F.explode(F.sequence(F.lit(1), F.lit(negatives)))
    drawn = chosen.select("user", "item", number.alias("n")).select(
        "user", (F.pmod(F.xxhash64("user", "item", "n", F.lit(seed)), F.lit(items)) + 1).cast("int")
    )
    others = drawn.toDF("user", "item").distinct().join(chosen, ["user", "item"], "left_anti")
    labelled = chosen.withColumn("label", F.lit(1.0))
    return labelled.unionByName(others.withColumn("label", F.lit(0.0))).cache()


def with_negatives(chosen, items, negatives, seed):
    """Add random negatives to a pandas frame that contains all items of its users."""
    rng = np.random.default_rng([seed, len(chosen)])
    drawn = pd.DataFrame(
        {
            "user": np.repeat(chosen["user"].to_numpy(), negatives),
            "item": rng.integers(1, items + 1, negatives * len(chosen)).astype("int32"),
        }
    ).drop_duplicates()
    keys = pd.MultiIndex.from_frame(chosen[["user", "item"]])
    others = drawn[~pd.MultiIndex.from_frame(drawn).isin(keys)]
    labelled = [chosen[["user", "item"]].assign(label=1.0), others.assign(label=0.0)]
    return pd.concat(labelled, ignore_index=True)


def shards_with_negatives(path, negatives, seed, partitions):
    """Return XShards of pandas frames of ``user``, ``item`` and ``label``."""
    names, types = ["user", "item", "rating", "time"], {"user": "int32", "item": "int32"}
    ratings = read_csv(path, sep="\t", names=names, dtype=types)
    items = int(ratings.max_values("item"))
    by_user = ratings.partition_by("user", partitions)
    return by_user.transform_shard(with_negatives, items, negatives, seed)


# -- the program ---------------------------------------------------------------------------------


def estimator(config, options, folder):
    return Estimator.from_keras(
        model_creator=model_creator,
        config=config,
        workers_per_node=options.workers_per_node,
        backend=options.backend,
        model_dir=os.path.join(folder, "checkpoints"),
    )


def main(argv=None):
    options = parse(argv)
    init_orca_context(options.cluster_mode, cores=options.cores, memory="2g")
    with tempfile.TemporaryDirectory() as folder:
        folder = options.output or folder
        path = os.path.join(options.data_dir or folder, "u.data")
        if options.data_dir is None:
            write_ratings(path, seed=options.seed)
        if options.input == "dataframe":
            train = frame_with_negatives(path, options.negatives, options.seed)
            highest = train.agg({"user": "max", "item": "max"}).first()
            users, items = highest["max(user)"] + 1, highest["max(item)"] + 1
        else:
            train = shards_with_negatives(path, options.negatives, options.seed, 2 * options.cores)
            users, items = (int(train.max_values(name)) + 1 for name in FEATURES)

        config = {"users": users, "items": items, "factors": options.factors, "lr": options.lr}
        columns = {"feature_cols": FEATURES, "label_cols": LABELS}
        fit = {"batch_size": options.batch_size, "seed": options.seed, **columns}
        begun = estimator(config, options, folder)
        begun.fit(train, epochs=max(1, options.epochs - 1), **fit)

        # another program resumes after this one is killed
        est = estimator(config, options, folder)
        stats = est.fit(train, epochs=options.epochs, resume="auto", **fit)
        metrics = est.evaluate(train, batch_size=16384, **columns)
        est.save(os.path.join(folder, "ncf.keras"))

        loaded = Estimator.from_keras(backend=options.backend)
        loaded.load(os.path.join(folder, "ncf.keras"))
        predicted = loaded.predict(train, batch_size=16384, feature_cols=FEATURES)
        rows = predicted.count() if options.input == "dataframe" else len(predicted)
    print(f"loss {stats['loss'][0]:.4f} ... {stats['loss'][-1]:.4f}, {rows} predictions")
    print(", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    return {"loss": stats["loss"], "rows": rows, **metrics}


def parse(argv):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data-dir", help="folder of MovieLens' u.data")
    parser.add_argument("--input", choices=["dataframe", "xshards"], default="dataframe")
    parser.add_argument("--cluster_mode", default="local", help="cluster_mode of init_orca_context")
    parser.add_argument("--backend", default="spark", help="backend of the Estimator")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--workers_per_node", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--factors", type=int, default=8)
    parser.add_argument("--negatives", type=int, default=4, help="negatives per rated item")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", help="folder for checkpoints and the model")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
    stop_orca_context()
