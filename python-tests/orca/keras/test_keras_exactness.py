"""N workers train a Keras model as one process would with the same batches."""

import cloudpickle
import numpy as np
import pytest
from engine_cases import with_horovod
from plain_workers import Crew
from reference_training import rows_of, union_batches

from bigdl.common.errors import UsageError
from bigdl.orca.learn.tf2.parts import KerasParts
from bigdl.runtime.collectives.horovod import HorovodSync
from bigdl.runtime.collectives.torch_distributed import TorchDistributedSync
from bigdl.training.keras.backends import Packed
from bigdl.training.keras.data import KerasEvaluationSettings
from bigdl.training.keras.loop import KerasEvaluateProgram, KerasFit, KerasFitSettings
from bigdl.training.position import StoppingCriterion

# every process that meets Keras first imports it, which takes long on a busy machine
pytestmark = pytest.mark.timeout(900)

SHARDS = {"7+4": [7, 4], "9+0": [9, 0], "1+5+3": [1, 5, 3]}
shards_param = pytest.mark.parametrize("sizes", SHARDS.values(), ids=SHARDS.keys())


BACKENDS = [
    pytest.param(("tensorflow", TorchDistributedSync), id="tensorflow"),
    pytest.param(("torch", TorchDistributedSync), id="torch"),
    pytest.param(("jax", TorchDistributedSync), id="jax", marks=pytest.mark.slow),
    *with_horovod(*((f"{name}-horovod", (name, HorovodSync)) for name in ("tensorflow", "torch"))),
]


@pytest.fixture(scope="module", params=BACKENDS)
def crew(request):
    """Three processes, the backend of Keras that they compute with, and how gradients meet."""
    with Crew(3) as crew:
        crew.backend, crew.sync = request.param
        yield crew


def drawn(model):
    """A model with weights that do not depend on the backend."""
    rng = np.random.default_rng(3)
    model.set_weights([0.5 * rng.normal(size=w.shape) for w in model.weights])
    return model


def net(config, **options):
    import keras

    model = drawn(
        keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(1)]
        )
    )
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(**{"optimizer": optimizer, "loss": "mse", "metrics": ["mae"], **options})
    return model


def adam(config):
    import keras

    return net(config, optimizer=keras.optimizers.Adam(0.05, clipnorm=0.5))


def summed(config):
    import keras

    return net(config, loss=keras.losses.MeanSquaredError(reduction="sum"))


def regularized(config):
    import keras

    model = net(config)
    model.layers[0].kernel_regularizer = keras.regularizers.L2(0.1)
    return model


def scaled(config):
    """Gradients of a scaled loss, added up over two batches, and averages of the weights."""
    import keras

    inner = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2, use_ema=True)
    return net(config, optimizer=keras.optimizers.LossScaleOptimizer(inner))


def with_table(config):
    """A large embedding, whose gradients stay sparse."""
    import keras

    ids, x = keras.Input((), dtype="int64", name="i"), keras.Input((4,), name="x")
    row = keras.layers.Embedding(1000, 3)(ids)
    out = keras.layers.Dense(1)(keras.layers.Concatenate()([row, x]))
    model = drawn(keras.Model({"i": ids, "x": x}, out))
    model.compile(optimizer=keras.optimizers.SGD(0.5), loss="mse", metrics=["mae"])
    return model


def with_own_step(config):
    import keras

    class Halved(keras.Model):
        def train_step(self, *given):
            *state, data = given  # JAX hands the state from step to step
            x, y = data[:2]
            return super().train_step(*state, (x, y / 2))

    model = net(config)
    made = Halved(model.inputs[0], model.outputs[0])
    made.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    return made


def eager(config):
    return net(config, run_eagerly=True)


def trained(worker, packed, settings, sync):
    """The weights of a rank after a fit, the optimizer's state and the figures."""
    parts, callbacks = packed.unpack({}, 1)
    fit = KerasFit(worker, sync(worker), parts, settings, callbacks, {})
    fit.epochs.run()
    state = [np.array(v) for v in (*fit.model.get_weights(),)]
    state += [np.asarray(v.numpy() if hasattr(v, "numpy") else v) for v in _variables(fit.model)]
    return state, fit.state.position.history


def _variables(model):
    import keras

    return [keras.ops.convert_to_numpy(v) for v in model.optimizer.variables]


def settings_of(features=("x",), labels=("y",), *, epochs=2, batch_size=4, **settings):
    goal, seed = StoppingCriterion(epochs=epochs), settings.pop("seed", 5)
    return KerasFitSettings(goal, batch_size, seed, features, labels, **settings)


def fit(crew, shards, creator=net, callbacks=(), **settings):
    """Train on a crew; state and figures of rank 0, after a look that all ranks agree."""
    payload = cloudpickle.dumps((KerasParts(creator), list(callbacks)))
    packed, settings = Packed(crew.backend, payload), settings_of(**settings)
    sync = crew.sync
    outcomes, _ = crew.run(
        lambda worker: trained(worker, packed, settings, sync), [{"data": s} for s in shards]
    )
    for state, _ in outcomes[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(outcomes[0][0], state, strict=True))
    return outcomes[0]


def alone(creator, shards, columns=("x",), *, epochs=2, batch_size=4, seed=5, weights=None):
    """The same by Keras in this process, batch by batch."""
    model, means = creator({}), []
    model.run_eagerly = True  # there are too few steps for a graph to pay
    for epoch in range(epochs):
        rows, losses = [], []
        for batch in union_batches(shards, batch_size, seed, epoch):
            batch = {k: v.numpy() for k, v in batch.items()}
            x = {c: batch[c] for c in columns} if len(columns) > 1 else batch[columns[0]]
            weight = None if weights is None else weights(batch)
            model.reset_metrics()
            found = model.train_on_batch(x, batch["y"], sample_weight=weight, return_dict=True)
            rows.append(len(batch["y"]))
            losses.append(float(found["loss"]))
        means.append(np.average(losses, weights=rows))
    return model, means


def check_equal(
    crew, shards, creator=net, columns=("x",), weights=None, tolerance=2e-5, **settings
):
    numbers = {k: v for k, v in settings.items() if k in ("epochs", "batch_size")}
    model, means = alone(creator, shards, columns, weights=weights, **numbers)
    model.optimizer.finalize_variable_values(model.trainable_weights)
    state, history = fit(crew, shards, creator, features=columns, **settings)
    for own, expected in zip(state, model.get_weights(), strict=False):
        np.testing.assert_allclose(own, expected, rtol=tolerance, atol=tolerance / 10)
    return [entry["logs"] for entry in history], means


@pytest.mark.slow_cases(
    *("tensorflow-adam-1+5+3", "tensorflow-adam-9+0", "torch-adam-9+0", "torch-net-9+0"),
    *("tensorflow-net-1+5+3", "torch-net-1+5+3"),
)
@shards_param
@pytest.mark.parametrize("creator", [net, adam])
def test_workers_equal_one_process(crew, sizes, creator):
    # the step of Adam does not get smaller with the gradient, so neither does that of an error
    tolerance = 1e-3 if creator is adam else 2e-5
    shards = rows_of(sizes, dtype="float32")
    logs, means = check_equal(crew, shards, creator, epochs=3, tolerance=tolerance)
    assert [entry["loss"] for entry in logs] == pytest.approx(means, rel=1e-5)


@pytest.mark.slow_cases("tensorflow-scaled", "torch-regularized", "torch-scaled")
@pytest.mark.parametrize("creator", [summed, regularized, scaled, with_own_step, eager])
def test_whatever_the_model_is(crew, creator):
    sizes = [9, 0] if creator is summed else [5, 3, 1]
    check_equal(crew, rows_of(sizes, dtype="float32"), creator, epochs=2)


@pytest.mark.slow_cases("tensorflow")
def test_sparse_gradients_of_a_table(crew):
    shards = rows_of([5, 0, 4], dtype="float32")
    logs, means = check_equal(crew, shards, with_table, columns=("i", "x"))
    assert [entry["loss"] for entry in logs] == pytest.approx(means, rel=1e-5)


def test_weights_of_rows_and_of_classes(crew):
    shards = rows_of([6, 3], dtype="float32")
    for shard in shards:
        shard["w"] = (shard["i"] % 3).astype("float32")
        shard["y"] = (shard["y"] > 0).astype("float32")
    table = {0: 0.25, 1: 2.0}

    def weights(batch):
        return batch["w"] * np.where(batch["y"] > 0, 2.0, 0.25).astype("float32")

    check_equal(crew, shards, weights=weights, labels=("y", "w"), weighted=True, class_weight=table)


@pytest.mark.slow_cases("tensorflow")
def test_a_loss_that_is_divided_by_the_weights(crew):
    def creator(config):
        import keras

        return net(config, loss=keras.losses.MeanSquaredError(reduction="mean_with_sample_weight"))

    shards = rows_of([5, 4], dtype="float32")
    for shard in shards:
        shard["w"] = 1 + (shard["i"] % 3).astype("float32")
    options = {"labels": ("y", "w"), "weighted": True}
    check_equal(crew, shards, creator, weights=lambda batch: batch["w"], **options)
    for shard in shards:
        shard["w"][:] = 0
    state, _ = fit(crew, shards, creator, epochs=1, **options)
    for own, expected in zip(state, net({}).get_weights(), strict=False):
        np.testing.assert_array_equal(own, expected)


def classifier(config, loss):
    import keras

    layers = [keras.Input((4,)), keras.layers.Dense(6, activation="tanh"), keras.layers.Dense(3)]
    model = drawn(keras.Sequential(layers))
    model.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.9), loss=loss)
    return model


def ignoring(config):
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)
    return classifier(config, loss)


# of functions Keras brings targets and outputs to one number of dimensions


def adding_up(config):
    import keras

    return net(config, loss=lambda y, out: 0.05 * keras.ops.sum((out - y) ** 2))


def averaging(config):
    import keras

    return net(config, loss=lambda y, out: keras.ops.mean(keras.ops.abs(out - y)))


def of_rows(config):
    import keras

    return net(config, loss=lambda y, out: keras.ops.sum((out - y) ** 2, axis=-1))


def masked(config):
    import keras

    def loss(y, out):
        kept = keras.ops.cast(y > 0, out.dtype)
        squares = (out - y) ** 2
        return keras.ops.sum(squares * kept) / keras.ops.maximum(keras.ops.sum(kept), 1.0)

    return net(config, loss=loss)


def mixing(config):
    import keras

    return net(config, loss=lambda y, out: keras.ops.std(out - y))


def told(crew, shards, creator, **settings):
    """Return what the user is told in a fit."""
    packed = Packed(crew.backend, cloudpickle.dumps((KerasParts(creator), [])))
    settings, sync = settings_of(**settings), crew.sync
    _, messages = crew.run(
        lambda worker: trained(worker, packed, settings, sync), [{"data": s} for s in shards]
    )
    return [doc["text"] for doc, _ in messages if "text" in doc]


@pytest.mark.parametrize("creator", [ignoring, adding_up, averaging, of_rows])
def test_a_loss_that_is_no_mean_over_the_rows(crew, creator):
    shards = rows_of([4, 5], dtype="float32")
    for shard in shards:
        if creator is ignoring:
            shard["y"] = np.where(shard["i"] % 3 == 0, -1, shard["c"]).astype("int32")
    check_equal(crew, shards, creator)
    assert not told(crew, shards, creator)


def test_a_loss_that_counts_something_of_its_own_is_named_or_told_what(crew):
    shards = rows_of([4, 5], dtype="float32")
    text, *_ = told(crew, shards, masked, epochs=1)  # of which the driver shows the first
    assert "is no mean and no sum over the rows" in text
    assert "loss_weight=" in text
    assert told(crew, shards, mixing, epochs=1)
    assert not told(crew, shards, mixing, epochs=1, loss_weight="rows")

    def counted(x, y):
        return (np.asarray(y) > 0).sum()

    check_equal(crew, shards, masked, loss_weight=counted)


@pytest.mark.slow_cases("tensorflow")
def test_metrics_of_an_epoch_do_not_depend_on_the_workers(crew):
    rows = rows_of([12], dtype="float32")[0]
    cut = [{k: v[i::3] for k, v in rows.items()} for i in range(3)]
    one = fit(crew, [rows], epochs=2, shuffle=False, batch_size=3)[1]
    three = fit(crew, cut, epochs=2, shuffle=False, batch_size=3)[1]
    for a, b in zip(one, three, strict=True):
        assert a["logs"] == pytest.approx(b["logs"], rel=1e-5)


def test_dropout_differs_between_ranks_and_training_is_repeatable(crew):
    def creator(config):
        import keras

        model = net(config)
        made = keras.Sequential([keras.Input((4,)), keras.layers.Dropout(0.5), *model.layers])
        made.compile(optimizer="sgd", loss="mse")
        return made

    shard = rows_of([6], dtype="float32")[0]
    first = fit(crew, [shard, shard], creator, shuffle=False)
    again = fit(crew, [shard, shard], creator, shuffle=False)
    single = fit(crew, [shard], creator, shuffle=False, batch_size=2)
    assert all(np.array_equal(a, b) for a, b in zip(first[0], again[0], strict=True))
    # with equal numbers on both ranks it would be that of one process
    assert not np.allclose(first[0][0], single[0][0], rtol=1e-6)


def test_running_averages_are_merged(crew):
    def creator(config):
        import keras

        made = keras.Sequential([keras.Input((4,)), keras.layers.BatchNormalization(momentum=0.0)])
        made.compile(optimizer=keras.optimizers.SGD(0.0), loss="mse")
        return made

    shards = rows_of([6, 2], dtype="float32")
    state, _ = fit(crew, shards, creator, labels=("x",), epochs=1, batch_size=8)
    means = [s["x"].mean(0) for s in shards]
    np.testing.assert_allclose(state[2], 0.75 * means[0] + 0.25 * means[1], rtol=1e-5, atol=1e-6)


def normalized(config):
    """The moments of the whole batch, also of the batch before: a rank may have no rows of one."""
    import keras

    layers = [
        keras.layers.Dense(6, activation="tanh"),
        keras.layers.BatchNormalization(momentum=0.5, synchronized=True),
        keras.layers.Dense(3),
        keras.layers.BatchNormalization(momentum=0.5, synchronized=True),
        keras.layers.Dense(1),
    ]
    model = drawn(keras.Sequential([keras.Input((4,)), *layers]))
    for layer in (model.layers[1], model.layers[3]):
        layer.moving_variance.assign(layer.moving_variance * 0 + 1)
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=["mae"])
    return model


@pytest.mark.slow_cases("tensorflow-1+5+3", "tensorflow-7+4", "tensorflow-9+0")
@pytest.mark.parametrize("sizes", [[7, 4], [9, 0], [1, 5, 3]], ids=["7+4", "9+0", "1+5+3"])
def test_synchronized_normalization_is_that_of_the_whole_batch(crew, sizes):
    if crew.backend != "tensorflow":
        pytest.skip("Keras has synchronized=True for TensorFlow only")
    shards = rows_of(sizes, dtype="float32")
    logs, means = check_equal(crew, shards, normalized, epochs=3, batch_size=4)
    assert [entry["loss"] for entry in logs] == pytest.approx(means, rel=1e-5)


def test_evaluation_does_not_depend_on_the_workers(crew):
    rows = rows_of([11], dtype="float32")[0]
    packed = Packed(crew.backend, cloudpickle.dumps((KerasParts(net), [])))
    program = KerasEvaluateProgram(
        packed, {}, crew.sync, KerasEvaluationSettings(4, ("x",), ("y",)), 1
    )
    found = []
    for count in (1, 2, 3):
        shards = [{"shard": {k: v[i::count] for k, v in rows.items()}} for i in range(count)]
        found.append(crew.run(program, shards)[0][0])
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-5)
    assert set(found[0]) == {"loss", "mae"}


@pytest.mark.slow_cases("tensorflow", "torch")
def test_sums_with_regularization_are_refused(crew):
    def creator(config):
        import keras

        layer = keras.layers.Dense(1, kernel_regularizer="l2")
        made = keras.Sequential([keras.Input((4,)), layer])
        made.compile(optimizer="sgd", loss=keras.losses.MeanSquaredError(reduction="sum"))
        return made

    with pytest.raises(UsageError, match="is not supported with regularization"):
        fit(crew, rows_of([3, 3], dtype="float32"), creator)
