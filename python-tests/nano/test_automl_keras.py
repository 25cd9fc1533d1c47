import copy
import pickle
import threading
from xmlrpc.client import Fault, ProtocolError, ServerProxy

import keras
import numpy as np
import optuna
import pytest
from refusals import refused

import bigdl.nano.automl.hpo as hpo
from bigdl.common.errors import UsageError
from bigdl.nano.automl import hpo_config
from bigdl.nano.automl.hpo import space
from bigdl.nano.automl.hpo.backend import PrunerType, SamplerType
from bigdl.nano.automl.tf.keras import Model, Sequential
from bigdl.nano.automl.tf.objective import pruning_of
from bigdl.nano.tf.keras import InferenceOptimizer
from bigdl.orca.learn.tf2.parts import KerasParts


@pytest.fixture(autouse=True)
def _quiet():
    keras.utils.set_random_seed(0)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    yield
    optuna.logging.set_verbosity(optuna.logging.INFO)


@pytest.fixture
def _enabled():
    hpo_config.enable_hpo_tf()
    yield
    hpo_config.disable_hpo_tf()


x = np.linspace(-1, 1, 64, dtype="float32").reshape(-1, 1)
y = 3 * x
labels = (x[:, 0] > 0).astype("int32")


def stack(units=None, rate=None, **compiled):
    """Return a searchable model for ``y`` with lazy layers."""
    from bigdl.nano.tf.keras.layers import Dense
    from bigdl.nano.tf.optimizers import SGD

    model = Sequential()
    model.add(keras.Input(shape=(1,)))
    model.add(Dense(units=units or space.Categorical(2, 8), activation="relu"))
    model.add(Dense(units=1))
    settings = {"loss": "mse"} | compiled
    model.compile(optimizer=SGD(learning_rate=rate or space.Real(1e-3, 0.3, log=True)), **settings)
    return model


@pytest.mark.usefixtures("_enabled")
def test_layers_optimizers_and_batch_size_are_searched_and_fit_trains_the_best(capsys):
    model = stack()
    model.search(
        n_trials=4,
        x=x,
        y=y,
        batch_size=space.Categorical(8, 32),
        epochs=2,
        sampler_kwargs={"seed": 0},
    )
    study = model.search_summary()
    best = study.best_params

    assert set(best) == {"units", "learning_rate", "batch_size"}
    assert "Number of finished trials: 4" in capsys.readouterr().out
    built = model.end_search()
    assert isinstance(built, keras.Sequential)
    assert built.layers[0].units == best["units"]
    assert float(built.optimizer.learning_rate) == pytest.approx(best["learning_rate"])
    history = model.fit(x, y, epochs=2, verbose=0)
    assert isinstance(history, keras.callbacks.History)
    assert history.params["steps"] == 64 // best["batch_size"]
    assert len(history.history["loss"]) == 2
    assert model.predict(x, verbose=0).shape == (64, 1)
    assert 0 <= model.evaluate(x, y, verbose=0) < 3
    assert model.end_search(use_trial_id=2).layers[0].units == study.trials[2].params["units"]


@pytest.mark.usefixtures("_enabled")
def test_the_listing_of_the_paper():
    import bigdl.nano.automl.space as space
    from bigdl.nano.tf.keras import Sequential
    from bigdl.nano.tf.keras.layers import Dense, Flatten

    images = np.random.default_rng(0).random((32, 4, 4), dtype="float32")
    model = Sequential()
    model.add(Flatten(input_shape=(4, 4)))
    model.add(Dense(units=space.Categorical([4, 16]), activation="relu"))
    model.add(Dense(units=space.Int(2, 5)))
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
    )
    targets = (images.mean((1, 2)) > 0.5).astype("int32")
    model.search(n_trials=2, x=images, y=targets, target_metric="accuracy", direction="maximize")
    model.fit(images, targets, verbose=0)

    assert set(model.study.best_params) == {"units", "units_2"}


@pytest.mark.usefixtures("_enabled")
def test_graphs_of_layers_are_searched():
    from bigdl.nano.tf.keras import Input
    from bigdl.nano.tf.keras.activations import relu
    from bigdl.nano.tf.keras.layers import Add, Dense

    inputs = Input(shape=(1,))
    hidden = Dense(units=space.Categorical(3, 6, prefix="wide"))(inputs)
    twice = Dense(6)(relu(hidden))
    outputs = Dense(1)(Add()([twice, Dense(6)(hidden)]))
    model = Model(inputs=inputs, outputs=outputs)
    model.compile(optimizer="adam", loss="mse", metrics=["mae"])
    model.search(n_trials=2, x=x, y=y, validation_split=0.25, epochs=1)

    study = model.search_summary()
    assert study.metric_names == ["val_mae"]
    assert set(study.best_params) == {"wide:units"}
    built = model.end_search()
    assert [type(layer).__name__ for layer in built.layers].count("Dense") == 4
    assert built.predict(x, verbose=0).shape == (64, 1)


@pytest.mark.usefixtures("_enabled")
def test_a_subclass_of_keras_model_is_searched():
    from bigdl.nano.tf.keras.layers import Dense

    @hpo.tfmodel()
    class Net(keras.Model):
        def __init__(self, units):
            super().__init__()
            self.units = units
            self.hidden = Dense(units, activation="relu")
            self.head = keras.layers.Dense(1)

        def call(self, inputs):
            return self.head(self.hidden(inputs))

    assert isinstance(Net(3), keras.Model)
    model = Net(units=space.Int(2, 6))
    model.compile(optimizer="sgd", loss="mse")
    model.search(n_trials=2, x=x, y=y, target_metric="loss", direction="minimize")
    model.fit(x, y, verbose=0)

    assert model.units == model.search_summary().best_params["units"]


def test_trials_share_no_weights_with_layers_that_existed_before():
    layer = keras.layers.Dense(1, kernel_initializer="ones")
    model = Sequential([keras.Input(shape=(1,)), layer])
    model.compile(
        optimizer=keras.optimizers.SGD(0.1), loss="mse", metrics=[keras.metrics.MeanSquaredError()]
    )
    model.search(
        n_trials=2, x=x, y=y, batch_size=space.Categorical(64), target_metric_mode="max", epochs=2
    )

    values = [trial.value for trial in model.study.trials]
    assert values[0] == pytest.approx(values[1])
    assert layer.kernel.numpy().item() == 1.0
    assert model.study.metric_names == ["mean_squared_error"]


@pytest.mark.usefixtures("_enabled")
def test_a_plain_layer_fits_each_size_of_the_lazy_layer_below_it():
    model = Sequential([keras.Input((1,))])
    model.add(space.AutoObject(keras.layers.Dense, units=space.Categorical(2, 8)))
    model.add(keras.layers.Dense(1))
    model.compile(optimizer="sgd", loss="mse")
    model.search(sampler=SamplerType.Grid, target_metric="loss", x=x, y=y, verbose=0)

    trials = model.study.trials
    assert sorted(trial.params["units"] for trial in trials) == [2, 8]
    assert all(trial.state.name == "COMPLETE" for trial in trials)


def test_a_model_without_spaces_is_an_ordinary_one():
    model = stack(units=4, rate=0.1)
    history = model.fit(x, y, epochs=3, verbose=0)

    assert history.history["loss"][-1] < history.history["loss"][0]
    assert model.count_params() == 4 * 2 + 5


@pytest.mark.slow
@pytest.mark.usefixtures("_enabled")
def test_unpromising_trials_end_between_epochs():
    model = stack()
    model.search(
        n_trials=10,
        x=x,
        y=y,
        epochs=3,
        sampler=SamplerType.Random,
        sampler_kwargs={"seed": 1},
        pruner=PrunerType.Median,
        pruner_kwargs={"n_startup_trials": 2},
    )
    states = [trial.state.name for trial in model.study.trials]

    assert "PRUNED" in states
    assert states.count("COMPLETE") + states.count("PRUNED") == 10


SEEN = []


class Remembers(keras.callbacks.Callback):
    """Tells of each epoch which callback it was, and whether it still had its first model."""

    def on_train_begin(self, logs=None):
        self.first = self.model

    def on_epoch_end(self, epoch, logs=None):
        SEEN.append((self, self.first is self.model))


@pytest.mark.usefixtures("_enabled")
def test_each_trial_has_copies_of_the_callbacks_also_in_threads():
    callback = Remembers()
    used = keras.Sequential([keras.Input(shape=(1,)), keras.layers.Dense(1)])
    used.compile("sgd", "mse")
    used.fit(x, y, callbacks=[callback], verbose=0)
    SEEN.clear()

    stack().search(n_trials=2, n_parallels=2, x=x, y=y, epochs=5, callbacks=[callback])

    callbacks = {id(each) for each, _ in SEEN}
    assert len(callbacks) == 2
    assert id(callback) not in callbacks
    assert all(same for _, same in SEEN)
    assert callback.model is used
    SEEN.clear()


class Locks(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()


@pytest.mark.usefixtures("_enabled")
def test_a_callback_that_cannot_be_copied_is_refused():
    with refused("model-copy"):
        stack().search(n_trials=1, x=x, y=y, callbacks=Locks())


class TwoEpochs:
    """What a judge needs of a trial, which is given up after two epochs."""

    def __init__(self):
        self.reported = {}

    def report(self, figure, epoch):
        if figure != figure:
            raise ValueError("not a number")
        self.reported[epoch] = figure

    def should_prune(self):
        return len(self.reported) == 2


@pytest.mark.timeout(120)
def test_a_judge_is_asked_from_elsewhere():
    trial = TwoEpochs()
    with pruning_of(trial, in_processes=True) as should_prune:
        asked = pickle.loads(pickle.dumps(should_prune))
        assert asked(0.5, 0) is False
        with pytest.raises(Fault, match=r"ValueError.*not a number"):
            asked(float("nan"), 1)
        assert asked(0.25, 1) is True
        address, _, _ = asked.args[0].rpartition("/")
        for path in ("", "/RPC2", "/0"):
            with pytest.raises(ProtocolError, match="404"):
                ServerProxy(address + path).should_prune(0.5, 2)
    with pytest.raises(ConnectionRefusedError):
        asked(0.25, 2)
    assert trial.reported == {0: 0.5, 1: 0.25}


@pytest.mark.slow
@pytest.mark.timeout(900)  # processes import two frameworks
@pytest.mark.usefixtures("_enabled")
def test_trials_that_train_in_processes_are_pruned_too():
    model = stack()
    model.search(
        n_trials=1,
        x=x,
        y=y,
        epochs=3,
        num_processes=2,
        pruner=PrunerType.Threshold,
        pruner_kwargs={"upper": 1e-12},
    )
    (trial,) = model.study.trials
    assert trial.state.name == "PRUNED"
    assert list(trial.intermediate_values) == [0]


@pytest.mark.slow
@pytest.mark.usefixtures("_enabled")
def test_a_searched_model_is_taken_for_the_model_that_it_has_become(tmp_path):
    model = stack()
    assert not isinstance(model, keras.Model)
    with pytest.raises(UsageError, match="call search before fit"):
        InferenceOptimizer.save(model, tmp_path / "saved")
    model.search(n_trials=1, x=x, y=y)
    InferenceOptimizer.save(model, tmp_path / "saved")  # makes the best one
    expected = model.predict(x, verbose=0)

    assert isinstance(model, keras.Sequential)
    assert InferenceOptimizer.load(tmp_path / "saved").predict(x, verbose=0) == pytest.approx(
        expected
    )
    fast = InferenceOptimizer.quantize(model, precision="bf16")
    assert fast.predict(x, verbose=0) == pytest.approx(expected, abs=0.05)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other.predict(x, verbose=0) == pytest.approx(expected)
    nested = keras.Sequential([keras.Input(shape=(1,)), model, keras.layers.Dense(2)])
    assert len(nested.weights) == 6
    model.trainable = False
    assert nested.layers[0].trainable_weights == []
    parts = KerasParts(None, None, {}).with_instance(model)
    assert parts.build().predict(x, verbose=0) == pytest.approx(expected)


@pytest.mark.usefixtures("_enabled")
def test_names_of_keras_2_are_answered():
    model = stack(units=3, rate=0.1)
    (spec,), keywords = model.save_spec()
    assert (spec.shape.as_list(), spec.dtype.name, keywords) == ([None, 1], "float32", {})
    with refused("unsupported", "to_json"):
        model.to_yaml()


@pytest.mark.slow
@pytest.mark.usefixtures("_enabled")
def test_resuming_goes_on(tmp_path):
    model = stack()
    settings = {"x": x, "y": y, "n_trials": 1}
    with pytest.warns(UserWarning, match="no search to resume"):
        model.search(resume=True, **settings)
    model.search(resume=True, **settings)
    assert len(model.study.trials) == 2

    stored = settings | {"storage": f"sqlite:///{tmp_path}/hpo.db", "study_name": "keras"}
    model.search(**stored)
    again = stack()
    again.search(resume=True, **stored)
    assert len(again.study.trials) == 2


@pytest.mark.slow
@pytest.mark.usefixtures("_enabled")
def test_two_processes_and_two_threads_search(tmp_path):
    model = stack()
    model.search(
        n_trials=4, x=x, y=y, n_parallels=2, storage=f"sqlite:///{tmp_path}/hpo.db", study_name="k"
    )
    assert [trial.state.name for trial in model.study.trials] == ["COMPLETE"] * 4
    assert model.fit(x, y, verbose=0).history["loss"]

    model.search(n_trials=4, x=x, y=y, n_parallels=2)
    assert [trial.state.name for trial in model.study.trials] == ["COMPLETE"] * 4


# --- wrong arguments


@pytest.mark.usefixtures("_enabled")
@pytest.mark.parametrize(
    ("compiled", "arguments", "said"),
    [
        ({}, {"epoch": 1}, "Invalid Arguments found for 'search': epoch"),
        ({}, {"target_metric": ["loss", "mae"]}, "multiple objective metric is not supported."),
        ({}, {"directions": ["minimize"] * 2}, "multiple objective metric is not supported."),
        ({}, {"target_metric": "mae"}, "target metric is should be loss or val_loss if metrics"),
        ({"metrics": ["mae"]}, {"target_metric": "mse"}, "invalid target metric 'mse'"),
        ({}, {"target_metric": "val_loss"}, "there is no validation"),
        (
            {"metrics": ["accuracy"]},
            {"target_metric": "accuracy", "direction": "minimize"},
            "must be 'maximize', not 'minimize'",
        ),
        ({}, {"direction": "maximize"}, "must be 'minimize', not 'maximize'"),
        ({}, {"target_metric_mode": "mean"}, "'mean' is not recognized"),
        ({}, {"n_trials": None}, "A search needs an end"),
        ({}, {"sampler": SamplerType.Grid}, "Only `space.Categorical` is supported"),
    ],
)
def test_wrong_arguments_of_a_search_are_errors(compiled, arguments, said):
    with pytest.raises(UsageError) as error:
        stack(**compiled).search(**({"n_trials": 1, "x": x, "y": y} | arguments))
    assert said in str(error.value)


@pytest.mark.usefixtures("_enabled")
def test_what_is_not_built_yet_says_so():
    model = stack()

    with refused("state"):
        model.fit(x, y)
    with pytest.raises(RuntimeError, match="Model is not actually built yet"):
        model.predict(x)
    with refused("not-fitted"):
        model.search_summary()
    with refused("argument-type"):
        model.add("Dense")
    assert not hasattr(model, "no_such_method")
    ordinary = stack(units=2, rate=0.1)
    with refused("search-space"):
        ordinary.fit(x, y, batch_size=space.Categorical(1, 2))


def test_names_take_spaces_while_hpo_is_enabled_only():
    layers = pytest.importorskip("bigdl.nano.tf.keras.layers")
    before = layers.Dense

    hpo_config.enable_hpo_tf()
    from bigdl.nano.tf import cast
    from bigdl.nano.tf.keras.layers import Dense
    from bigdl.nano.tf.optimizers import Adam

    assert isinstance(Dense(units=space.Int(1, 2)), space.AutoObject)
    assert isinstance(Adam(0.1), keras.optimizers.Adam)
    assert isinstance(Adam(learning_rate=space.Real(0, 1)), space.AutoObject)
    assert isinstance(keras.layers.Dense(1), Dense)
    assert cast(np.ones(2), "int32").dtype == "int32"
    hpo_config.disable_hpo_tf()

    assert layers.Dense is before
    assert isinstance(layers.Dense(1), keras.layers.Layer)
    assert not hpo_config.hpo_tf
