"""States of Keras optimizers that belong to another optimizer or schedule."""

import keras
import numpy as np
import pytest
from refusals import refused

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.learn.tf2 import Estimator
from bigdl.training.keras.state import dump_optimizers, optimizer_name, put_optimizers
from bigdl.training.state import dumps, loads

# every process that meets Keras first imports it, which takes long on a busy machine
pytestmark = pytest.mark.timeout(900)

ROWS = np.linspace(-1, 1, 24 * 4, dtype="float32").reshape(24, 4)
DATA = ROWS, ROWS.sum(1, keepdims=True)
schedules, optimizers = keras.optimizers.schedules, keras.optimizers


def decaying(rate=0.1):
    return schedules.ExponentialDecay(rate, 2, 0.7)


def cosine(rate=0.1):
    return schedules.CosineDecay(rate, 10)


def linear(optimizer):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    if model.optimizer is not None:
        model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.parametrize(
    ("kept", "made", "names"),
    [
        # of equal variables, so that shapes say nothing
        (
            lambda: optimizers.SGD(0.1, momentum=0.9),
            lambda: optimizers.Lion(0.1),
            "SGD, but the program uses Lion; resume with SGD",
        ),
        (
            lambda: optimizers.SGD(decaying()),
            lambda: optimizers.SGD(cosine()),
            "SGD with the schedule ExponentialDecay, but the program uses SGD with the schedule "
            "CosineDecay; resume with SGD with",
        ),
        (
            lambda: optimizers.SGD(0.1),
            lambda: optimizers.SGD(cosine()),
            "SGD, but the program uses SGD with the schedule CosineDecay; resume",
        ),
        (
            lambda: optimizers.LossScaleOptimizer(optimizers.Adam(decaying())),
            lambda: optimizers.Adam(decaying()),
            "LossScaleOptimizer of Adam with the schedule ExponentialDecay, but the program uses "
            "Adam with",
        ),
    ],
)
def test_the_state_of_another_optimizer_or_schedule_is_refused_by_name(kept, made, names):
    data, other = dump_optimizers(linear(kept())), linear(made())
    with pytest.raises(UsageError, match=f"has the state of the optimizer {names}"):
        put_optimizers(other, data)
    put_optimizers(linear(kept()), data)


@pytest.mark.parametrize(
    ("kept", "made", "said"),
    [  # of one class and of equal variables
        ({"momentum": 0.9}, {"use_ema": True}, ("program has use_ema", "checkpoint has not")),
        ({"use_ema": True}, {"momentum": 0.9}, ("checkpoint has use_ema", "program has not")),
        (
            {"gradient_accumulation_steps": 2},
            {"momentum": 0.5},
            ("program has momentum", "checkpoint has not"),
        ),
    ],
)
def test_averages_of_weights_are_not_taken_for_momentum(kept, made, said):
    data = dump_optimizers(linear(optimizers.SGD(**kept)))
    with refused("checkpoint-mismatch", *said):
        put_optimizers(linear(optimizers.SGD(**made)), data)
    put_optimizers(linear(optimizers.SGD(**kept)), data)


def test_the_states_of_another_number_of_optimizers_are_refused():
    two = linear(optimizers.SGD())
    two.second = optimizers.SGD()
    with refused("checkpoint-mismatch", "1", "2"):
        put_optimizers(two, dump_optimizers(linear(optimizers.SGD())))


def test_rates_and_other_numbers_of_an_optimizer_may_differ():
    first, then = linear(optimizers.Adam(decaying(0.1))), linear(optimizers.Adam(decaying(0.2)))
    first.train_on_batch(*DATA)
    put_optimizers(then, dump_optimizers(first))
    assert int(then.optimizer.iterations) == 1
    # a rate that a callback has set, and a rate as a function
    rate = linear(optimizers.SGD(lambda: 0.1)).optimizer
    assert optimizer_name(rate) == optimizer_name(linear(optimizers.SGD(0.3)).optimizer) == "SGD"


def test_states_without_names_are_compared_by_their_shapes():
    state = loads(dump_optimizers(linear(optimizers.Adam())))
    del state["names"], state["slots"]
    put_optimizers(linear(optimizers.Adam()), dumps(state))
    with refused("model-mismatch"):
        put_optimizers(linear(optimizers.SGD()), dumps(state))


def test_a_fit_that_goes_on_with_another_optimizer_is_refused_by_name(tmp_path):
    def estimator(optimizer, **options):
        return Estimator.from_keras(
            model_creator=lambda config: linear(optimizer()), backend="local", **options
        )

    def sgd():
        return optimizers.SGD(np.float64(0.01), momentum=np.float64(0.9))

    def adam():
        return optimizers.Adam(schedules.CosineDecay(np.float32(0.1), np.int64(10)))

    def fit(est, epochs=2, **options):
        return est.fit(DATA, epochs=epochs, batch_size=12, **options)

    folder, file = str(tmp_path / "models"), str(tmp_path / "state.pt")
    first = estimator(sgd, model_dir=folder)
    fit(first, epochs=1)
    assert len(fit(estimator(sgd, model_dir=folder), resume="auto")["loss"]) == 2
    first.save_checkpoint(file)
    message = "optimizer SGD, but the program uses Adam with the schedule CosineDecay; resume"
    with pytest.raises((UsageError, WorkerError), match=message):
        fit(estimator(adam, model_dir=folder), epochs=3, resume="auto")
    other = estimator(adam)
    other.load_checkpoint(file)
    with pytest.raises((UsageError, WorkerError), match=message):
        fit(other)
    # the way out
    weights = str(tmp_path / "a.weights.h5")
    first.save_weights(weights)
    other.load_weights(weights)
    assert len(fit(other)["loss"]) == 2
