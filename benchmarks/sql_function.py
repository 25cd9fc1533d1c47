"""A model as a SQL function, and ``predict_batch_udf`` with OpenVINO by hand.

    python benchmarks/sql_function.py [--rows 200000] [--repeats 5] [--json FILE]

The same network (512 inputs, three hidden layers of 1024, 16 outputs) scores the same cached rows
of ``array<float>`` on a Spark of two cores, in batches of 256 rows:

* by ``pyspark.ml.functions.predict_batch_udf`` whose function reads and compiles the network by
  OpenVINO, as users write it;
* by ``Estimator.as_udf(accelerate="openvino_fp32")``;
* by ``as_udf`` of an Estimator of the same network of OpenVINO;
* by ``Estimator.as_udf()``, which computes with torch.

All sides are interleaved; medians and ranges. The memory is the largest resident size of a Python
worker of Spark that a side has started, each in separate workers.
"""

import argparse
import json
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import openvino
import psutil
import torch
from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import functions as F
from pyspark.sql import types as T

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context
from bigdl.orca.learn.openvino import Estimator as OpenvinoEstimator
from bigdl.orca.learn.pytorch import Estimator

WIDTH, OUTPUTS, BATCH = 512, 16, 256


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = [torch.nn.Linear(WIDTH, 1024), torch.nn.ReLU()]
    for _ in range(2):
        layers += [torch.nn.Linear(1024, 1024), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(1024, OUTPUTS)).eval()


def by_hand(path: str, precision: str):
    """Return a typical ``predict_batch_udf`` with an OpenVINO network.

    On a processor with AMX it computes in bf16 by default.
    """

    def make():
        core = openvino.Core()
        options = {"INFERENCE_NUM_THREADS": 1, "PERFORMANCE_HINT": "LATENCY"}
        options["INFERENCE_PRECISION_HINT"] = precision
        compiled = core.compile_model(path, "CPU", options)

        def predict(inputs: np.ndarray) -> np.ndarray:
            return compiled(inputs.astype(np.float32))[0]

        return predict

    return predict_batch_udf(
        make,
        return_type=T.ArrayType(T.FloatType()),
        batch_size=BATCH,
        input_tensor_shapes=[[WIDTH]],
    )


class PeakMemory:
    """Context that measures the peak memory of a Python worker of Spark, in MB."""

    def __enter__(self):
        self.peak, self._stop = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    def _watch(self):
        own = psutil.Process()
        while not self._stop.wait(0.1):
            for child in own.children(recursive=True):
                try:
                    if "python" in child.name():
                        self.peak = max(self.peak, child.memory_info().rss / 1e6)
                except psutil.Error:
                    continue


def seconds(frame, function) -> float:
    start = time.perf_counter()
    frame.select(F.sum(F.element_at(function("features"), 1))).collect()
    return time.perf_counter() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--rows", type=int, default=200_000)
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--json", type=Path)
    chosen = options.parse_args()
    # every query in new workers would measure their start; they are ended between sides by hand
    init_orca_context("local", cores=2, memory="6g")
    spark = OrcaContext.get_spark_session()
    spark.sparkContext.setLogLevel("ERROR")
    frame = (
        spark.range(0, chosen.rows, 1, 8)
        .select(
            F.transform(
                F.sequence(F.lit(0), F.lit(WIDTH - 1)),
                lambda k: F.sin(F.col("id") + k).cast("float"),
            ).alias("features")
        )
        .cache()
    )
    frame.count()
    model = network()
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "network.xml")
        example = torch.zeros(BATCH, WIDTH)
        converted = openvino.convert_model(model, example_input=example, input=[(-1, WIDTH)])
        openvino.save_model(converted, path, compress_to_fp16=False)
        estimator = Estimator.from_torch(model=model)
        sides = {
            "`predict_batch_udf`, OpenVINO by hand": by_hand(path, "f32"),
            "`as_udf`, OpenVINO": estimator.as_udf(
                "features", BATCH, accelerate="openvino_fp32", sample=frame
            ),
            "`as_udf`, network of OpenVINO": OpenvinoEstimator.from_openvino(
                model_path=path
            ).as_udf("features", BATCH),
            "`as_udf`, torch": estimator.as_udf("features", BATCH, sample=frame),
        }
        if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
            sides["`predict_batch_udf`, OpenVINO in bf16 by hand"] = by_hand(path, "bf16")
            sides["`as_udf`, OpenVINO in bf16"] = estimator.as_udf(
                "features", BATCH, accelerate="openvino_bf16", sample=frame
            )
        rows = [
            frame.select(side("features").alias("y")).limit(100).collect()
            for side in sides.values()
        ]
        first, *others = (np.array([row.y for row in each]) for each in rows)
        for each in others:
            assert np.allclose(first, each, atol=1e-3)
        times: dict[str, list[float]] = {name: [] for name in sides}
        memory: dict[str, float] = {}
        for repeat in range(chosen.repeats + 1):
            for name, side in sides.items():
                if not repeat:  # in separate workers, which also warms up
                    end_python_workers()
                    with PeakMemory() as used:
                        seconds(frame, side)
                    memory[name] = used.peak
                else:
                    times[name].append(seconds(frame, side))
    base = statistics.median(next(iter(times.values())))
    print("| Implementation | rows/s | range | to by hand | memory |\n|---|---|---|---|---|")
    for name, each in times.items():
        rates = sorted(chosen.rows / t for t in each)
        median = statistics.median(each)
        print(
            f"| {name} | {chosen.rows / median:,.0f} | {rates[0]:,.0f}–{rates[-1]:,.0f} | "
            f"{base / median:.2f}× | {memory[name]:.0f} MB |"
        )
    if chosen.json:
        chosen.json.write_text(json.dumps({"seconds": times, "memory_mb": memory}, indent=1))
    stop_orca_context()


def end_python_workers() -> None:
    """End the Python workers of Spark; the next query starts others."""
    for child in psutil.Process().children(recursive=True):
        try:
            if "python" in child.name():
                child.kill()
        except psutil.Error:
            continue
    time.sleep(1)


if __name__ == "__main__":
    main()
