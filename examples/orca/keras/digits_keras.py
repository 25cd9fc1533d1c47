"""Train a Keras model on handwritten digits from a tf.data.Dataset creator.

python examples/orca/keras/digits_keras.py
"""

import argparse

from sklearn.datasets import load_digits

from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.data import XShards
from bigdl.orca.learn.tf2 import Estimator

TRAIN_ROWS = 1500


def images_and_labels():
    digits = load_digits()
    return (digits.images[..., None] / 16).astype("float32"), digits.target


def train_creator(config, batch_size):
    """Return the training dataset; called in every worker, which takes its part of each batch."""
    import tensorflow as tf

    x, y = images_and_labels()
    data = tf.data.Dataset.from_tensor_slices((x[:TRAIN_ROWS], y[:TRAIN_ROWS]))
    return data.shuffle(TRAIN_ROWS).batch(batch_size).prefetch(2)


def model_creator(config):
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(16, 3, activation="relu"),
            layers.Flatten(),
            layers.Dropout(0.2),
            layers.Dense(10, activation="softmax"),
        ]
    )
    optimizer = keras.optimizers.Adam(config["lr"])
    model.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cluster_mode", default="local", help="cluster_mode of init_orca_context")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=5e-3)
    options = parser.parse_args(argv)

    init_orca_context(options.cluster_mode, cores=2, memory="2g")
    est = Estimator.from_keras(
        model_creator=model_creator, config={"lr": options.lr}, workers_per_node=2, backend="spark"
    )
    stats = est.fit(train_creator, epochs=options.epochs, batch_size=64, seed=0)
    x, y = images_and_labels()
    test = XShards.partition({"x": x[TRAIN_ROWS:], "y": y[TRAIN_ROWS:]})
    metrics = est.evaluate(test)
    right = sum(
        int((shard["prediction"].argmax(1) == shard["y"]).sum())
        for shard in est.predict(test).collect()
    )
    accuracy = right / (len(y) - TRAIN_ROWS)
    print(f"loss {stats['loss'][-1]:.4f}, accuracy of the test rows {accuracy:.3f}")
    return {"loss": stats["loss"], "accuracy": accuracy, **metrics}


if __name__ == "__main__":
    main()
    stop_orca_context()
