"""Small Keras models that several test modules share."""

from __future__ import annotations

import keras
import numpy as np


def convolutional(seed: int = 0) -> keras.Model:
    """Images of 8 x 8 to three classes; compiled."""
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3), name="image"),
            keras.layers.Conv2D(8, 3, padding="same", use_bias=False),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.GlobalAveragePooling2D(),
            keras.layers.Dense(3, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def nested(seed: int = 0) -> keras.Model:
    """A dict of numbers and categories to a dict with a tensor and a list."""
    keras.utils.set_random_seed(seed)
    numbers = keras.Input((4,), name="numbers")
    category = keras.Input((2,), dtype="int32", name="category")
    vectors = keras.layers.Flatten()(keras.layers.Embedding(10, 3)(category))
    hidden = keras.layers.Dense(6, activation="gelu")(
        keras.layers.Concatenate()([numbers, vectors])
    )
    outputs = {"score": keras.layers.Dense(1)(hidden), "more": [hidden, numbers + 1.0]}
    return keras.Model({"numbers": numbers, "category": category}, outputs)


class Subclassed(keras.Model):
    """A model that does not tell its input, with an attribute and a method of its own."""

    def __init__(self, width: int = 4):
        super().__init__()
        self.width = width
        self.dense = keras.layers.Dense(width)

    def call(self, x, training=False):
        return self.dense(x) + (1.0 if training else 0.0)

    def describe(self) -> str:
        return f"{self.width} wide"

    def get_config(self) -> dict:
        return {"width": self.width}


def images(rows: int = 6, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).random((rows, 8, 8, 3), dtype=np.float32)


def tables(rows: int = 6, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "numbers": random.random((rows, 4), dtype=np.float32),
        "category": random.integers(0, 10, (rows, 2)).astype(np.int32),
    }


def flat(value) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in keras.tree.flatten(value)]
