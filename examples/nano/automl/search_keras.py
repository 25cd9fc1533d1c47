"""Search the hyperparameters of a Keras model for handwritten digits.

python examples/nano/automl/search_keras.py
"""

from __future__ import annotations

import argparse

import keras
from sklearn.datasets import load_digits

from bigdl.nano.automl import hpo_config
from bigdl.nano.automl.hpo import space

hpo_config.enable_hpo_tf()  # before layers and optimizers are imported

from bigdl.nano.tf.keras import Input, Sequential  # noqa: E402
from bigdl.nano.tf.keras.layers import Conv2D, Dense, Flatten  # noqa: E402
from bigdl.nano.tf.optimizers import RMSprop  # noqa: E402


def main(argv: list[str] | None = None) -> dict:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args(argv)

    keras.utils.set_random_seed(0)
    data = load_digits()
    x, y = data.images[..., None].astype("float32") / 16, data.target

    model = Sequential()
    model.add(Input(shape=(8, 8, 1)))
    model.add(Conv2D(filters=space.Categorical(8, 16), kernel_size=3, activation="relu"))
    model.add(Flatten())
    model.add(Dense(units=space.Int(16, 64, prefix="hidden"), activation="relu"))
    model.add(Dense(units=10, activation="softmax"))
    model.compile(
        optimizer=RMSprop(learning_rate=space.Real(1e-4, 1e-2, log=True)),
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    model.search(
        n_trials=options.trials,
        target_metric="val_accuracy",
        direction="maximize",
        sampler_kwargs={"seed": 0},
        x=x,
        y=y,
        validation_split=0.25,
        batch_size=space.Categorical(32, 128),
        epochs=options.epochs,
    )
    study = model.search_summary()
    history = model.fit(x, y, validation_split=0.25, verbose=0)
    accuracy = history.history["val_accuracy"][-1]
    print(f"best model, trained again: {accuracy:.3f}")
    return {"parameters": study.best_params, "best": study.best_value, "accuracy": accuracy}


if __name__ == "__main__":
    main()
