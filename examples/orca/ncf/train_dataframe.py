"""NeuMF on MovieLens, from Spark DataFrame to Spark DataFrame.

    python examples/orca/ncf/train_dataframe.py --data-dir ml-100k

Spark ML indexes the ids, a Spark SQL plan draws negatives, the Estimator trains on the DataFrame,
and predictions are returned as a column of it.
"""

import os
import tempfile

import neumf
from pyspark.ml.feature import StringIndexer
from pyspark.sql import functions as F

from bigdl.orca import OrcaContext, stop_orca_context


def read_ratings(spark, options):
    """Return ``user``, ``item`` and ``time``, with ids as integers from 0."""
    schema = "user STRING, item STRING, rating DOUBLE, time LONG"
    ratings = spark.read.csv(neumf.ratings_file(options), sep="\t", schema=schema)
    if options.users:
        ratings = ratings.filter(F.col("user").cast("int") <= options.users)
    names = {"inputCols": ["user", "item"], "outputCols": ["user_index", "item_index"]}
    indexed = StringIndexer(**names).fit(ratings).transform(ratings)
    index = [F.col(f"{name}_index").cast("int").alias(name) for name in ("user", "item")]
    return indexed.select(*index, "time")


def main(argv=None):
    options = neumf.parse(argv, __doc__)
    neumf.start(options)
    ratings = read_ratings(OrcaContext.get_spark_session(), options)
    per_user, users, items = neumf.histories(ratings.cache())
    train = neumf.training_rows(per_user, options.negatives, options.seed)
    test = neumf.test_rows(per_user, options.candidates, options.seed)

    columns = {"feature_cols": neumf.FEATURES, "label_cols": neumf.LABELS}
    fit = {"batch_size": options.batch_size, "seed": options.seed, **columns}
    est = neumf.make_estimator(options, users, items)
    stats = est.fit(train, epochs=max(1, options.epochs - 1), **fit)

    with tempfile.TemporaryDirectory() as folder:
        folder = options.output or folder
        est.save_checkpoint(os.path.join(folder, "ncf.ckpt"))

        resumed = neumf.make_estimator(options, users, items)
        resumed.load_checkpoint(os.path.join(folder, "ncf.ckpt"))
        stats += resumed.fit(train, epochs=1, **fit)
        resumed.save(os.path.join(folder, "ncf.pt"))

        metrics = resumed.evaluate(test, batch_size=16384, **columns)
        predicted = resumed.predict(test, batch_size=16384, feature_cols=neumf.FEATURES)
        path = os.path.join(folder, "predictions.parquet")
        predicted.write.mode("overwrite").parquet(path)
        hr = neumf.hit_rate(OrcaContext.get_spark_session().read.parquet(path))
    return neumf.report(stats, metrics, hr)


if __name__ == "__main__":
    main()
    stop_orca_context()
