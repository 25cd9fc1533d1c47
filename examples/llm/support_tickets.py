"""Group support tickets of a Delta table and name their mood, in a job that can be continued.

    python examples/llm/support_tickets.py --rows 400

The tickets are embedded, clustered by k-means, and answered by a small language model that must
choose one of three words. Answers go to a journal: if the program is killed, run it again, and
only tickets without an answer are computed. The result is written to another Delta table.
"""

import argparse
import os

import deltalake
import packaged_models
import pandas as pd
import pyarrow as pa
import tickets
from pyspark.ml.clustering import KMeans
from pyspark.ml.functions import array_to_vector

from bigdl.friesian.feature import FeatureTable
from bigdl.llm import TextModel, embed, prompt
from bigdl.orca import init_orca_context, stop_orca_context

MOODS = ["angry", "neutral", "happy"]


def cluster(df, groups):
    """Add the column ``group`` to embedded tickets."""
    vectors = df.where("embedding is not null").withColumn("features", array_to_vector("embedding"))
    model = KMeans(k=groups, seed=1, featuresCol="features", predictionCol="group").fit(vectors)
    return model.transform(vectors).drop("features", "embedding", "embedding_error")


def purity(frame):
    """Return the share of tickets whose kind is the most frequent one of their group."""
    table = pd.crosstab(frame["group"], frame["kind"])
    return table.max(axis=1).sum() / len(frame)


def main(argv=None):
    """Run the pipeline and return the result as a pandas DataFrame."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200, help="tickets to generate")
    parser.add_argument("--table", default="tickets", help="Delta table of tickets")
    parser.add_argument("--result", default="answered", help="Delta table to write")
    parser.add_argument("--journal", default="journal", help="folder of answers")
    parser.add_argument("--encoder", help="folder of an embedding model")
    parser.add_argument("--decoder", help="folder or GGUF file of a language model")
    parser.add_argument("--new-tokens", type=int, default=8)
    options = parser.parse_args(argv)

    if not os.path.exists(options.table):
        made = pa.Table.from_pandas(tickets.generate(options.rows), preserve_index=False)
        deltalake.write_deltalake(options.table, made)
    encoder = TextModel(packaged_models.encoder(options.encoder))
    decoder = TextModel(packaged_models.decoder(options.decoder))

    init_orca_context("local", cores=2)
    try:
        df = FeatureTable.read_parquet(options.table).df
        embedded = embed(df, "text", model=encoder, journal=options.journal + "/embed")
        grouped = cluster(embedded.cache(), len(tickets.KINDS))
        answered = prompt(
            grouped,
            "How does the writer of this message feel? {text}",
            model=decoder,
            output="mood",
            choices=MOODS,
            max_new_tokens=options.new_tokens,
            journal=options.journal + "/prompt",
        )
        frame = answered.toPandas()
    finally:
        stop_orca_context()
    result = pa.Table.from_pandas(frame, preserve_index=False)
    deltalake.write_deltalake(options.result, result, mode="overwrite")
    print(frame.groupby("group").agg(tickets=("id", "size"), example=("text", "first")))
    print(frame["mood"].value_counts(dropna=False).to_string())
    print(f"{len(frame)} tickets; share in the group of their kind: {purity(frame):.2f}")
    return frame


if __name__ == "__main__":
    main()
