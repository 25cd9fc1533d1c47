"""Keras models that train in several processes of this machine."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
from refusals import refused

from bigdl.common import private_folders as scratch
from bigdl.common.errors import UsageError
from bigdl.nano.tf.keras import (
    Input,
    Model,
    Sequential,
    nano,
    nano_bf16,
    nano_multiprocessing,
    nano_multiprocessing_loss,
)
from bigdl.nano.tf.keras.layers import Dense, Embedding, Flatten
from bigdl.nano.tf.optimizers import SparseAdam
from bigdl.nano.tf.training import feeds
from bigdl.nano.tf.training.feeds import feed_of
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.runtime.worker import Worker

pytestmark = pytest.mark.timeout(900)  # processes import two frameworks each

ROWS = np.random.default_rng(0).integers(0, 30, (25, 2))
TARGETS = (ROWS.sum(1) % 2).astype(np.float32)


def recommender() -> keras.Model:
    """Its embedding has sparse gradients, its dense layers have dense ones."""
    keras.utils.set_random_seed(0)
    item = Input((2,), dtype="int32", name="item")
    hidden = Dense(4, activation="tanh")(Flatten()(Embedding(30, 3)(item)))
    model = Model(item, Dense(1, activation="sigmoid")(hidden))
    model.compile(SparseAdam(0.05), "binary_crossentropy", metrics=["accuracy", "auc"])
    return model


def classifier() -> keras.Model:
    keras.utils.set_random_seed(0)
    model = Sequential([Dense(3, activation="softmax")])  # without an input, so not built
    model.compile(keras.optimizers.SGD(0.5), "sparse_categorical_crossentropy")
    return model


def batches(size: int = 8) -> tf.data.Dataset:
    random = np.random.default_rng(1)
    x, y = random.random((24, 5), dtype=np.float32), np.arange(24) % 3
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(size)


def assert_alike(one: keras.Model, other: keras.Model) -> None:
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        assert np.allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_two_processes_make_the_steps_of_one_also_with_rows_that_do_not_come_out_even():
    # batches of 8, 8, 8 and 1 row, of which the second process gets none
    order = {
        "batch_size": 8,
        "epochs": 2,
        "shuffle": False,
        "validation_data": (ROWS[:9], TARGETS[:9]),
        "class_weight": {0: 1.0, 1: 2.0},
        "verbose": 0,
    }
    alone, together = recommender(), recommender()
    expected = alone.fit(ROWS, TARGETS, **order)
    found = together.fit(ROWS, TARGETS, **order, num_processes=2)
    assert_alike(alone, together)
    assert found.epoch == expected.epoch == [0, 1]
    assert set(found.history) == set(expected.history)
    for name, figures in expected.history.items():
        assert found.history[name] == pytest.approx(figures, abs=1e-4), name
    assert int(together.optimizer.iterations) == int(alone.optimizer.iterations) == 8
    assert together.history is found


class Recorder(keras.callbacks.Callback):
    """Stops in the second epoch, and looks at the model meanwhile."""

    def __init__(self):
        super().__init__()
        self.losses = []

    def on_epoch_end(self, epoch, logs=None):
        self.losses.append(self.model.evaluate(np.ones((2, 5)), np.ones(2), verbose=0))
        self.model.optimizer.learning_rate = 0.25
        if epoch == 1:
            self.model.stop_training = True


@pytest.mark.slow
def test_a_dataset_is_shared_and_callbacks_run_once():
    alone, together = classifier(), classifier()
    one, other = Recorder(), Recorder()
    alone.fit(batches(), epochs=5, callbacks=[one], verbose=0)
    history = together.fit(batches(), epochs=5, callbacks=[other], verbose=0, num_processes=2)
    assert history.epoch == [0, 1]
    assert other.losses == pytest.approx(one.losses, abs=1e-5)
    assert float(together.optimizer.learning_rate) == 0.25
    assert_alike(alone, together)


@nano_multiprocessing_loss()
def squares(y_true, y_pred):
    return tf.reduce_mean((tf.one_hot(y_true, 3) - y_pred) ** 2, -1)


@tf.function
@nano_multiprocessing
def train_step(x, y, model, loss, optimizer):
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=True))
    gradients = tape.gradient(value, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return value


def train(model, dataset, loss, optimizer, step, epochs):
    losses = []
    for _ in range(epochs):
        for x, y in dataset:
            losses.append(float(step(x, y, model, loss, optimizer)))
    return losses


@pytest.mark.slow
def test_a_loop_of_the_user_s_own_makes_the_same_steps_in_two_processes():
    results = []
    for processes in (1, 2):
        keras.utils.set_random_seed(0)
        model = Sequential([Input((5,)), Dense(3, activation="softmax")])
        optimizer = keras.optimizers.Adam(0.1)
        losses = nano(num_processes=processes)(train)(
            model, batches(7), squares, optimizer, train_step, 2
        )
        results.append((model, losses, int(optimizer.iterations)))
    (alone, expected, _), (together, found, steps) = results
    assert found == pytest.approx(expected, abs=1e-5)
    assert_alike(alone, together)
    assert steps == 8


def test_a_step_in_bfloat16_casts_what_is_in_floating_point():
    @nano_bf16
    def step(x, y, model, *, scale):
        return x, y, model, scale

    x, y, model, scale = step(np.ones(2, np.float32), tf.constant([1]), "model", scale=x_of(2.0))
    assert x.dtype == tf.bfloat16
    assert (y.dtype, model, scale.dtype) == (tf.int32, "model", tf.float32)


def x_of(value: float) -> tf.Tensor:
    return tf.constant(value)


def wrong_loss(model):
    model.compile("sgd", keras.losses.MeanSquaredError(reduction="none"))
    return model


WRONG = {
    "backend": (
        lambda m: m.fit(batches(), num_processes=2, backend="horovod"),
        "Backend horovod is not implemented.",
    ),
    "number": (
        lambda m: m.fit(batches(), num_processes=0),
        "num_processes should be a positive integer",
    ),
    "not compiled": (
        lambda m: Sequential([Dense(1)]).fit(ROWS, TARGETS, num_processes=2),
        "call compile()",
    ),
    "no reduction": (
        lambda m: wrong_loss(m).fit(ROWS, TARGETS, num_processes=2),
        "A loss has reduction='none'",
    ),
    "no end": (lambda m: m.fit(batches().repeat(), num_processes=2), "pass steps_per_epoch"),
    "rows": (
        lambda m: m.fit(batches().unbatch(), num_processes=2),
        "must yield batches",
    ),
    "targets": (
        lambda m: m.fit(batches(), TARGETS, num_processes=2),
        "do not pass y and sample_weight",
    ),
    "lengths": (lambda m: m.fit(ROWS, TARGETS[:3], num_processes=2), "the same number of rows"),
    "kind": (lambda m: m.fit(3, num_processes=2), "x must hold arrays"),
    "empty": (lambda m: m.fit(iter(()), num_processes=2), "yields nothing"),
    "steps": (
        lambda m: m.fit(batches(), steps_per_epoch=0, num_processes=2),
        "steps_per_epoch should be a positive integer, got 0",
    ),
    "validation without end": (
        lambda m: m.fit(batches(), validation_data=batches().repeat(), num_processes=2),
        "The dataset has no end; pass validation_steps",
    ),
    "unlike batches": (
        lambda m: m.fit(iter([(np.ones((2, 5)), [0, 1]), (np.ones(2), [0, 1])]), num_processes=2),
        "must have the same nesting and ranks",
    ),
    "backend of one process": (
        lambda m: m.fit(batches(), backend="banana"),
        "Backend banana is not implemented.",
    ),
    "two models": (
        lambda m: nano(num_processes=2)(train)(m, m),
        "there should be only one keras.Model in the function parameter list, but got 2",
    ),
    "processes of a loop": (lambda m: nano(num_processes=-1)(train), "num_processes should be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_before_a_process_starts(case):
    call, sentence = WRONG[case]
    with pytest.raises(UsageError) as raised:
        call(classifier())
    assert sentence in str(raised.value)


def endless(size: int = 8):
    while True:
        yield from batches(size).as_numpy_iterator()


@pytest.mark.slow
def test_data_without_end_train_and_validate_for_as_many_steps_as_are_asked_for():
    alone, together = classifier(), classifier()
    order = {"epochs": 2, "steps_per_epoch": 2, "validation_steps": 2, "verbose": 0}
    expected = alone.fit(endless(), validation_data=batches(8).repeat(), **order)
    found = together.fit(endless(), validation_data=endless(), **order, num_processes=2)
    assert_alike(alone, together)
    for name, figures in expected.history.items():
        assert found.history[name] == pytest.approx(figures, abs=1e-4), name


@pytest.mark.parametrize("kind", ["generator", "from_generator"])
def test_python_s_data_without_end_are_given_up_and_leave_nothing(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(feeds, "MAX_BATCHES", 20)
    monkeypatch.setenv(scratch.VARIABLE, str(tmp_path))
    spec = batches().element_spec
    source = {
        "generator": endless,
        "from_generator": lambda: tf.data.Dataset.from_generator(endless, output_signature=spec),
    }[kind]
    with refused("data-endless", "20", "steps_per_epoch"):
        classifier().fit(source(), num_processes=2)
    with refused("data-endless", "20", "validation_steps"):
        classifier().fit(batches(), validation_data=source(), num_processes=2)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


def test_data_that_would_fill_the_disk_are_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv(scratch.VARIABLE, str(tmp_path))
    monkeypatch.setattr(feeds.shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000))
    with refused("data-size"):
        classifier().fit(endless(), steps_per_epoch=10**9, num_processes=2)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


def test_an_interrupted_generator_leaves_nothing(tmp_path, monkeypatch):
    def interrupted():
        yield from pairs()
        raise KeyboardInterrupt

    monkeypatch.setenv(scratch.VARIABLE, str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        classifier().fit(interrupted(), num_processes=2)
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


def test_batches_of_several_shapes_and_of_texts_are_read_back_as_they_were(tmp_path):
    given = [
        ((np.arange(6).reshape(2, 3), np.array(["a", "bc"])), np.ones(2)),
        ((np.arange(4).reshape(1, 4), np.array(["longer"])), np.ones(1, np.float32)),
    ]
    path, spec = feeds.write_batches(iter(given), tmp_path)
    assert spec[0][0].shape.as_list() == [None, None]
    found = list(feeds.read_batches(path, spec).as_numpy_iterator())
    for ((numbers, texts), targets), ((x, words), y) in zip(given, found, strict=True):
        assert (x.tolist(), y.tolist(), y.dtype) == (numbers.tolist(), targets.tolist(), float)
        assert [word.decode() for word in words] == texts.tolist()


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        return np.full((2, 5), index, np.float32), np.zeros(2)


def test_a_pydataset_may_have_no_end(tmp_path):
    feed = feed_of(Endless(), steps=2, epochs=2, folder=tmp_path)
    rows = feed.open(TorchDistributedSync(Worker(0, 1)), 0)
    parts = list(rows.parts(0, 0, wrap=False))
    assert [int(part.batch[0][0, 0]) for part in parts] == [0, 1, 2, 3]


def test_a_fit_without_processes_is_keras_own():
    model = classifier()
    history = model.fit(batches(), epochs=1, verbose=0, num_processes=1)
    assert list(history.history) == ["loss"]
    with pytest.warns(UserWarning, match="have no effect"):
        model.fit(batches(), verbose=0, workers=2)


def pairs(times: int = 1):
    for _ in range(times):
        yield from batches().as_numpy_iterator()


class Pairs(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return list(batches().as_numpy_iterator())[index]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["generator", "from_generator", "PyDataset"])
def test_data_that_only_this_process_can_make_are_made_here(kind):
    spec = batches().element_spec
    source, steps = {
        "generator": (lambda: pairs(2), 3),
        "from_generator": (
            lambda: tf.data.Dataset.from_generator(pairs, output_signature=spec),
            None,
        ),
        "PyDataset": (Pairs, None),
    }[kind]
    alone, together = classifier(), classifier()
    alone.fit(batches(), epochs=2, verbose=0)
    together.fit(source(), epochs=2, steps_per_epoch=steps, verbose=0, num_processes=2)
    assert_alike(alone, together)


@pytest.mark.slow
def test_shuffled_rows_are_each_taken_once_by_all_processes():
    x, y = np.eye(12, dtype=np.float32), np.arange(12) % 3
    for data in (
        {"x": x, "y": y, "batch_size": 12},
        {"x": tf.data.Dataset.from_tensor_slices((x, y)).shuffle(12).batch(12)},
    ):
        alone, together = classifier(), classifier()
        alone.fit(x, y, batch_size=12, shuffle=False, verbose=0)
        together.fit(**data, verbose=0, num_processes=2)
        assert_alike(alone, together)


@pytest.mark.slow
def test_processes_may_be_tasks_of_ray():
    alone, together = classifier(), classifier()
    alone.fit(batches(), epochs=2, verbose=0)
    together.fit(batches(), epochs=2, verbose=0, num_processes=2, backend="ray")
    assert_alike(alone, together)


@pytest.mark.slow
def test_the_example_learns_digits_and_finds_a_faster_form(tmp_path):
    path = Path(__file__).parents[2] / "examples" / "nano" / "keras" / "keras_digits.py"
    spec = importlib.util.spec_from_file_location("keras_digits", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    methods = ["openvino_int8", "bf16"]
    found = example.main(["--methods", *methods, "--drop", "0.02", "--output", str(tmp_path)])
    assert found["history"]["val_accuracy"][-1] > 0.9
    assert set(found["results"].index) == {"original", *methods}
    assert found["accuracy"] > 0.9


@pytest.mark.slow
def test_a_graph_of_tensorflow_below_the_decorators_is_sent_to_other_processes():
    @nano_multiprocessing
    @tf.function
    def train_step(x, y, model, loss, optimizer):
        with tf.GradientTape() as tape:
            value = loss(y, model(x, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return value

    @nano(num_processes=2)
    def train(model, dataset, loss, optimizer):
        return [float(train_step(x, y, model, loss, optimizer)) for x, y in dataset]

    class Own(keras.layers.Layer):
        def __init__(self, factor):
            super().__init__()
            self.factor = factor

        def call(self, x):
            return x * self.factor

    dense = keras.layers.Dense(1, kernel_initializer="zeros")
    model = keras.Sequential([keras.Input((2,)), Own(2.0), dense])
    x, y = tf.ones((8, 2)), tf.ones((8, 1))
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(4)
    losses = train(model, dataset, keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.01))
    assert losses[0] == pytest.approx(1.0)
    assert losses[1] < losses[0]


def test_a_step_of_the_models_own_gets_the_elements_as_they_are():
    class Own(Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(1, kernel_initializer="zeros")

        def call(self, x):
            return self.out(x["x"] if isinstance(x, dict) else x)

        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(data["x"]) - data["y"]) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
            return {"error": loss}

    data = {"x": np.ones((8, 2), "float32"), "y": np.ones((8, 1), "float32")}
    model = Own()
    model.compile(keras.optimizers.SGD(0.1))
    history = model.fit(
        tf.data.Dataset.from_tensor_slices(data).batch(8), epochs=2, num_processes=2, verbose=0
    )
    assert history.history["error"][0] == pytest.approx(1.0)
    assert history.history["error"][1] < 1.0
