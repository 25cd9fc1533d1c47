"""Train a Keras model in two processes, then accelerate its predictions.

    python examples/nano/keras/keras_digits.py --processes 2

A small convolutional network is trained on scikit-learn's digits in several processes, which make
the same steps as one. Then all of Nano's Keras methods are measured, and the fastest one that keeps
the accuracy is saved, loaded and used.
"""

import argparse
import tempfile
from pathlib import Path

import keras
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from bigdl.nano.tf.keras import InferenceOptimizer, Sequential
from bigdl.nano.tf.keras.layers import Conv2D, Dense, Flatten, MaxPooling2D


def digits():
    """Return images (N, 8, 8, 1) from 0 to 1 and their digits, for training and testing."""
    data = load_digits()
    images = (data.images[..., None] / 16).astype(np.float32)
    return train_test_split(images, data.target, random_state=0)


def network():
    keras.utils.set_random_seed(0)
    model = Sequential(
        [
            keras.Input((8, 8, 1)),
            Conv2D(16, 3, padding="same", activation="relu"),
            MaxPooling2D(),
            Conv2D(32, 3, padding="same", activation="relu"),
            Flatten(),
            Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument(
        "--drop", type=float, default=0.01, help="maximum relative loss of accuracy"
    )
    parser.add_argument("--methods", nargs="*", help="methods to try; all by default")
    parser.add_argument("--output", type=Path, help="directory for the model")
    args = parser.parse_args(argv)

    x, x_test, y, y_test = digits()
    model = network()
    history = model.fit(
        x,
        y,
        batch_size=64,
        epochs=args.epochs,
        validation_data=(x_test, y_test),
        num_processes=args.processes,
    )

    optimizer = InferenceOptimizer()
    optimizer.optimize(
        model,
        x,
        validation_data=(x_test, y_test),
        metric=keras.metrics.SparseCategoricalAccuracy(),
        batch_size=32,
        includes=args.methods,
    )
    best, option = optimizer.get_best_model(accuracy_criterion=args.drop)

    with tempfile.TemporaryDirectory() as folder:
        path = (args.output or Path(folder)) / "model"
        InferenceOptimizer.save(best, path)
        loaded = InferenceOptimizer.load(path)
        _, accuracy = loaded.evaluate(x_test, y_test, verbose=0)
    print(f"{option}: accuracy {accuracy:.3f}")
    return {"history": history.history, "results": optimizer.results(), "accuracy": accuracy}


if __name__ == "__main__":
    main()
