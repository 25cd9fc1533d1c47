"""Marginal CPU cost of `embed` per text, beside a pandas UDF with sentence-transformers.

    python benchmarks/ai_functions.py MODEL [--rows 4000] [--rounds 3] [--baseline PATH]
        [--json results.json]

MODEL is a sentence-transformers folder. All sides embed the same texts, paragraphs of Python's
manual, in one session of Spark with two cores and one thread per task. Sides take turns in each
round. A side embeds `rows` texts and a quarter of them; the cost is the difference of the CPU
seconds of the process tree (JVM, Python workers, engine), divided by the difference in texts, so
that the start of jobs and models is not measured. PATH is a folder with sentence-transformers
(``pip install --no-deps --target PATH sentence-transformers``); without it there is no baseline.
"""

import argparse
import json
import statistics
import time
from pydoc_data.topics import topics

import numpy as np
import psutil

from bigdl.llm import TextModel, embed
from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context


def texts_of(count):
    paragraphs = [" ".join(p.split()) for topic in topics.values() for p in topic.split("\n\n")]
    paragraphs = [p for p in paragraphs if 40 <= len(p) <= 600]
    return [f"{n} {paragraphs[n * 7919 % len(paragraphs)]}" for n in range(count)]


def cpu_seconds():
    total = 0.0
    process = psutil.Process()
    for each in [process, *process.children(recursive=True)]:
        try:
            times = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += times.user + times.system
    return total


def udf_side(folder, path):
    import pandas as pd
    from pyspark.sql.functions import pandas_udf

    def encode(batches):
        import sys

        sys.path.insert(0, path)
        import torch
        from sentence_transformers import SentenceTransformer

        torch.set_num_threads(1)
        model = SentenceTransformer(folder, device="cpu")
        for batch in batches:
            yield pd.Series(list(model.encode(batch.tolist(), batch_size=32)))

    encode.__annotations__ = {}
    from collections.abc import Iterator

    encode.__annotations__ = {"batches": Iterator[pd.Series], "return": Iterator[pd.Series]}
    function = pandas_udf(encode, "array<float>")
    return lambda frame: frame.withColumn("embedding", function("text"))


def vectors_of(run, frame):
    return np.stack(run(frame).orderBy("id").toPandas().embedding)


def measured(run, frame):
    cpu, start = cpu_seconds(), time.perf_counter()
    run(frame).selectExpr("count(embedding)", "sum(embedding[0])").collect()
    return cpu_seconds() - cpu, time.perf_counter() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--rows", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--baseline", default=None)
    parser.add_argument("--json", default=None)
    options = parser.parse_args()
    models = {name: TextModel(options.model, name) for name in ("fp32", "int8")}
    init_orca_context("local", cores=2, extra_params={"spark.ui.enabled": "false"})
    spark = OrcaContext.get_spark_session()
    sides = {
        f"embed {name}": lambda frame, model=model: embed(frame, "text", model=model)
        for name, model in models.items()
    }
    if options.baseline is not None:
        sides["pandas_udf, sentence-transformers"] = udf_side(options.model, options.baseline)
    sizes = (options.rows // 4, options.rows)
    frames = []
    for size in sizes:
        rows = list(enumerate(texts_of(size)))
        frames.append(spark.createDataFrame(rows, ["id", "text"]).repartition(2).cache())
        frames[-1].count()
    vectors = {name: vectors_of(run, frames[0]) for name, run in sides.items()}  # warms up
    costs = {name: [] for name in sides}
    for _ in range(options.rounds):
        for name, run in sides.items():
            (small, _), (large, _) = (measured(run, frame) for frame in frames)
            costs[name].append(1000 * (large - small) / (sizes[1] - sizes[0]))
    reference = vectors.get("pandas_udf, sentence-transformers", vectors["embed fp32"])
    results = {}
    for name, values in costs.items():
        likeness = (vectors[name] * reference).sum(1)
        results[name] = {
            "ms_per_text": statistics.median(values),
            "range": [min(values), max(values)],
            "cosine_mean": float(likeness.mean()),
            "cosine_min": float(likeness.min()),
        }
        print(name, json.dumps(results[name]), flush=True)
    stop_orca_context()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=1)


if __name__ == "__main__":
    main()
