"""Inference of Keras models with Nano and with Keras.

    python benchmarks/nano_keras.py [--batch 32] [--repeats 9] [--methods openvino_int8 bf16]
        [--clock wall] [--json results.json] [--quick]

A convolutional network for images of 32 x 32 is trained for a moment, so that its predictions mean
something. Sides are ``model(x)``, ``model.predict(x)`` and, for each method of Nano, both calls of
the accelerated model, in one process on the same cores. Each repeat runs all of them in turn, so
that the noise of a shared machine meets all of them. Ratios are medians over the repeats of the
ratio within one repeat, with their range: ``model.predict`` over ``fast.predict``, and ``model(x)``
over ``fast(x)``. On a machine that others use, ``--clock cpu`` compares the time of all threads on
their cores instead. Agreement is the part of new images that get the original's class.
"""

import argparse
import json
import os
import statistics
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
CLASSES = 10
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def images(count, seed):
    """Return noise images with a bright square whose position is the class."""
    import numpy as np

    random = np.random.default_rng(seed)
    x = 0.5 * random.standard_normal((count, 32, 32, 3), dtype=np.float32)
    y = random.integers(0, CLASSES, count)
    for image, label in zip(x, y, strict=True):
        row, column = divmod(int(label), 4)
        image[row * 10 : row * 10 + 8, column * 8 : column * 8 + 8] += 0.5
    return x, y


def network(widths):
    import keras

    keras.utils.set_random_seed(0)
    x = image = keras.Input((32, 32, 3))
    for width in widths:
        for _ in range(2):
            x = keras.layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
            x = keras.layers.ReLU()(keras.layers.BatchNormalization()(x))
        x = keras.layers.MaxPooling2D()(x)
    x = keras.layers.Dense(CLASSES, activation="softmax")(keras.layers.Flatten()(x))
    model = keras.Model(image, x)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def once(call, clock):
    begin = clock()
    call()
    return clock() - begin


def times(sides, repeats, clock):
    """Return the seconds of each implementation in each repeat, interleaved."""
    for call in sides.values():
        call()
        call()
    return [{name: once(call, clock) for name, call in sides.items()} for _ in range(repeats)]


def ratio(rounds, base, side):
    """Return median, minimum and maximum of the ratio."""
    speedups = [each[base] / each[side] for each in rounds]
    return statistics.median(speedups), min(speedups), max(speedups)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--methods", nargs="*")
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny network")
    args = parser.parse_args(argv)

    import numpy as np

    from bigdl.nano.tf.keras import InferenceOptimizer

    model = network((8, 16) if args.quick else (64, 128, 256))
    x, y = images(512, 0)
    model.fit(x, y, batch_size=32, epochs=2, verbose=0)
    batch, _ = images(args.batch, 1)
    test, labels = images(256, 2)
    expected = model.predict(test, verbose=0)

    names = args.methods or list(InferenceOptimizer.ALL_INFERENCE_ACCELERATION_METHOD)[1:]
    fast = {name: InferenceOptimizer.build(model, name, x=x[:128]) for name in names}
    sides = {
        "model(x)": lambda: np.asarray(model(batch)),
        "model.predict": lambda: model.predict(batch, verbose=0),
    }
    for name, each in fast.items():
        sides[f"{name}(x)"] = lambda each=each: np.asarray(each(batch))
        sides[f"{name}.predict"] = lambda each=each: each.predict(batch, verbose=0)
    rounds = times(sides, args.repeats, CLOCKS[args.clock])

    accuracy = float(np.mean(expected.argmax(-1) == labels))
    print(f"batch {args.batch}, accuracy of the original {accuracy:.3f}")
    milliseconds = {name: 1e3 * statistics.median(r[name] for r in rounds) for name in sides}
    for name in ("model(x)", "model.predict"):
        print(f"{name:28} {milliseconds[name]:9.2f} ms")
    rows = {}
    for name, each in fast.items():
        predictions = each.predict(test, verbose=0)
        rows[name] = {
            "milliseconds": milliseconds[f"{name}.predict"],
            "over predict": ratio(rounds, "model.predict", f"{name}.predict"),
            "over call": ratio(rounds, "model(x)", f"{name}(x)"),
            "agreement": float(np.mean(predictions.argmax(-1) == expected.argmax(-1))),
        }
        ratios = "   ".join(
            f"{what} {rows[name][what][0]:5.2f} ({rows[name][what][1]:.2f} to "
            f"{rows[name][what][2]:.2f})"
            for what in ("over predict", "over call")
        )
        agreement = rows[name]["agreement"]
        print(f"{name:28} {rows[name]['milliseconds']:9.2f} ms   {ratios}   agree {agreement:.3f}")
    if args.json:
        args.json.write_text(json.dumps({"batch": args.batch, "methods": rows}, indent=1))
    return rows


if __name__ == "__main__":
    main()
