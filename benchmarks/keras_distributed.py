"""Keras on two workers, compared with one process, and the cost of the gradient exchange.

    python benchmarks/keras_distributed.py [--sections fit reduce frame] [--repeats N] [--json FILE]
        [--quick]

===========  =====================================================================================
``fit``      Rows per second of the epochs after the first, of a convolutional network on images:
             two workers of one thread each by ``backend="spark"``, beside ``model.fit`` of one
             process that may use every core. Batches are the same.
``reduce``   Seconds that the exchange of gradients adds to a step, at 0.1, 1 and 12 million
             parameters. Workers make the same steps in three ways: ``none`` leaves the gradients
             where they are, ``one`` concatenates them, all-reduces once and cuts them up again
             (TensorFlow only), and ``ours``.
``frame``    Rows per second of training on a Spark DataFrame of numbers, from the call to the
             trained weights: ``fit(df)``, beside ``df.toPandas()`` and ``model.fit``. One epoch.
===========  =====================================================================================

``KERAS_BACKEND`` chooses what Keras computes with. Sides take turns; the first round is not
counted, since processes start and graphs are made in it. A ratio is the median over the rounds of
the ratio within a round, with its range, and above 1 when ours is the faster one. The goal of
``reduce`` is half of what one concatenated all-reduce cost on two cores when it was measured
first, 110 ms.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import keras
import numpy as np

WORKERS = 2
FEATURES = [f"x{i}" for i in range(8)]
GOAL_MS = 55  # at most, of 12 million parameters


def median_of(values):
    return f"{statistics.median(values):.4g} ({min(values):.4g}–{max(values):.4g})"


def in_turns(sides, repeats):
    """Return the results of every implementation in each round, without the first round."""
    measurements = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name in list(sides) if repeat % 2 else list(reversed(sides)):
            value = sides[name]()
            print(f"  {repeat} {name:14} {value:.5g}", flush=True)
            if repeat:
                measurements[name].append(value)
    return measurements


def ratios(measurements, ours, theirs):
    pairs = zip(measurements[ours], measurements[theirs], strict=True)
    return [a / b for a, b in pairs]


def estimator(creator, config):
    from bigdl.orca.learn.tf2 import Estimator

    return Estimator.from_keras(
        model_creator=creator,
        config=config,
        workers_per_node=WORKERS,
        backend="spark",
        log_to_driver=False,
    )


# -- two workers and one process ------------------------------------------------------------------


def convolutional(config):
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((32, 32, 3))])
    for width in config["widths"]:
        model.add(layers.Conv2D(width, 3, padding="same", activation="relu"))
        model.add(layers.MaxPooling2D())
    model.add(layers.Flatten())
    model.add(layers.Dense(10, activation="softmax"))
    model.compile("adam", "sparse_categorical_crossentropy")
    return model


class EpochSeconds(keras.callbacks.Callback):
    """Callback that records the start and end time of each epoch."""

    def __init__(self):
        super().__init__()
        self.seconds = []

    def on_epoch_begin(self, epoch, logs=None):
        self._began = time.perf_counter()

    def on_epoch_end(self, epoch, logs=None):
        self.seconds.append(time.perf_counter() - self._began)


def measure_fit(options):
    rng = np.random.default_rng(0)
    rows, batch = options.images, 128
    x = rng.random((rows, 32, 32, 3), dtype=np.float32)
    y = rng.integers(0, 10, rows)
    config = {"widths": (8, 16) if options.quick else (32, 64, 128)}
    plain = convolutional(config)
    est = estimator(convolutional, config)

    def alone():
        watch = EpochSeconds()
        plain.fit(x, y, batch_size=batch, epochs=3, verbose=0, callbacks=[watch])
        return rows / statistics.median(watch.seconds[1:])

    def together():
        history = est.fit((x, y), epochs=3, batch_size=batch, seed=0, profile=True, verbose=0)
        return rows / statistics.median(each["epoch_s"] for each in history["profile"][1:])

    rates = in_turns({"plain Keras": alone, "two workers": together}, options.repeats)
    ratio = ratios(rates, "two workers", "plain Keras")
    print("\n| rows/s | median (range) |\n|---|---|")
    for name, values in rates.items():
        print(f"| {name} | {median_of(values)} |")
    print(f"| ratio | {median_of(ratio)} |")
    return {"rows_per_s": rates, "ratio": ratio}


# -- the exchange of gradients --------------------------------------------------------------------


def perceptron(config):
    """Return a perceptron with four large layers of the requested size, and small layers."""
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    width = round((config["parameters"] / 4) ** 0.5)
    hidden = [layers.Dense(width, activation="relu") for _ in range(4)]
    model = keras.Sequential([keras.Input((width,)), *hidden, layers.Dense(1)])
    model.compile(keras.optimizers.SGD(1e-3), "mse")
    return model


class AnotherWay(keras.callbacks.Callback):
    """Alternative gradient exchange of the workers: none, or in one piece."""

    def __init__(self, way):
        super().__init__()
        self._way = way

    def on_train_begin(self, logs=None):
        optimizer = self.model.optimizer
        for name in ("apply", "stateless_apply"):
            vars(optimizer).pop(name, None)
        if self._way == "one":
            base = type(optimizer).apply

            def apply(grads, variables=None):
                return base(optimizer, in_one_piece(list(grads)), variables)

            object.__setattr__(optimizer, "apply", apply)


def in_one_piece(gradients):
    import tensorflow as tf
    import torch
    import torch.distributed as dist

    def reduce(*arrays):
        flat = torch.from_numpy(np.concatenate([each.reshape(-1) for each in arrays]) / WORKERS)
        dist.all_reduce(flat)
        ends = np.cumsum([each.size for each in arrays])
        parts = np.split(flat.numpy(), ends[:-1])
        return [part.reshape(each.shape) for part, each in zip(parts, arrays, strict=True)]

    summed = tf.numpy_function(reduce, gradients, [each.dtype for each in gradients])
    for new, old in zip(summed, gradients, strict=True):
        new.set_shape(old.shape)
    return summed


def seconds_of_a_step(parameters, way, options):
    """Return the median over later epochs of the mean step of both workers."""
    est = estimator(perceptron, {"parameters": parameters, "shuffle": False})
    rows = 8 * WORKERS * options.steps
    x = np.ones((rows, round((parameters / 4) ** 0.5)), np.float32)
    history = est.fit(
        (x, x[:, 0]),
        epochs=4,
        batch_size=8 * WORKERS,
        seed=0,
        callbacks=[] if way == "ours" else [AnotherWay(way)],
        profile=True,
        verbose=0,
    )
    return statistics.median(each["mean_step_s"] for each in history["profile"][1:])


def measure_reduce(options):
    ways = ["none", "one", "ours"] if keras.backend.backend() == "tensorflow" else ["none", "ours"]
    summary = {}
    for parameters in options.parameters:
        print(f"\n{parameters / 1e6:g} million parameters, seconds of a step")
        sides = {way: partial(seconds_of_a_step, parameters, way, options) for way in ways}
        step_times = in_turns(sides, options.repeats)
        added = {
            way: [
                1e3 * (own - none)
                for own, none in zip(step_times[way], step_times["none"], strict=True)
            ]
            for way in ways[1:]
        }
        summary[f"{parameters / 1e6:g}"] = {"step_s": step_times, "added_ms": added}
    print(
        "\n| parameters | step without exchange, ms | way | ms added to a step |\n|---|---|---|---|"
    )
    for name, each in summary.items():
        alone = statistics.median(each["step_s"]["none"]) * 1e3
        for way, added in each["added_ms"].items():
            print(f"| {name} M | {alone:.3g} | {way} | {median_of(added)} |")
    if "12" in summary:
        median = statistics.median(summary["12"]["added_ms"]["ours"])
        print(f"\ngoal at 12 M: {GOAL_MS} ms, {'met' if median <= GOAL_MS else 'missed'}")
    return summary


# -- from a DataFrame -----------------------------------------------------------------------------


def of_numbers(config):
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    inputs = [keras.Input((), name=name) for name in FEATURES]
    x = layers.Concatenate()([layers.Reshape((1,))(each) for each in inputs])
    x = layers.Dense(32, activation="relu")(x)
    model = keras.Model(dict(zip(FEATURES, inputs, strict=True)), layers.Dense(1)(x))
    model.compile("adam", "mse")
    return model


def measure_frame(options):
    from bigdl.orca import OrcaContext

    spark = OrcaContext.get_spark_session()
    numbers = [f"float(rand({i})) AS {name}" for i, name in enumerate(FEATURES)]
    frame = spark.range(options.rows).selectExpr(*numbers)
    frame = frame.selectExpr("*", "x0 + x1 * x2 AS y").cache()
    assert frame.count() == options.rows
    results = {"cached": measure_one_frame("cached DataFrame", frame, options)}
    with tempfile.TemporaryDirectory(prefix="bigdl-bench-") as folder:
        frame.write.parquet(f"{folder}/rows")
        frame.unpersist()
        scan = spark.read.parquet(f"{folder}/rows")
        results["Parquet"] = measure_one_frame("spark.read.parquet", scan, options)
    return results


def measure_one_frame(title, frame, options):
    plain, batch = of_numbers({}), 8192
    est = estimator(of_numbers, {})

    def collected():
        began = time.perf_counter()
        table = frame.toPandas()
        x = {name: table[name].to_numpy() for name in FEATURES}
        plain.fit(x, table["y"].to_numpy(), batch_size=batch, verbose=0)
        return options.rows / (time.perf_counter() - began)

    def distributed():
        began = time.perf_counter()
        columns = {"feature_cols": FEATURES, "label_cols": ["y"]}
        est.fit(frame, batch_size=batch, seed=0, verbose=0, **columns)
        return options.rows / (time.perf_counter() - began)

    measurements = in_turns({"toPandas": collected, "fit(df)": distributed}, options.repeats)
    ratio = ratios(measurements, "fit(df)", "toPandas")
    print(f"\n| {title}: rows/s, end to end | median (range) |\n|---|---|")
    for name, values in measurements.items():
        print(f"| {name} | {median_of(values)} |")
    print(f"| ratio | {median_of(ratio)} |")
    return {"rows_per_s": measurements, "ratio": ratio}


def main():
    sections = {"fit": measure_fit, "reduce": measure_reduce, "frame": measure_frame}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sections", nargs="+", choices=sections, default=list(sections))
    parser.add_argument("--parameters", type=float, nargs="+", default=[1e5, 1e6, 12e6])
    parser.add_argument("--steps", type=int, default=25, help="of an epoch of reduce")
    parser.add_argument("--images", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=2_000_000, help="of the DataFrame")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="file for all results")
    parser.add_argument("--quick", action="store_true", help="little data, one repeat")
    options = parser.parse_args()
    if options.quick:
        options.images, options.rows = 1024, 100_000
        options.steps, options.repeats = 8, 1

    from bigdl.orca import init_orca_context, stop_orca_context

    init_orca_context("local", cores=WORKERS, memory="4g")
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores; Python "
        f"{platform.python_version()}, keras {keras.__version__} on {keras.backend.backend()}"
    )
    results = {}
    for name in options.sections:
        print(f"\n## {name}", flush=True)
        results[name] = sections[name](options)
    stop_orca_context()
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
