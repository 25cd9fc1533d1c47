"""The files of Keras Estimators: their forms, and models that do not know their shapes."""

import logging

import keras
import numpy as np
import pytest
from refusals import refused

from bigdl.common.errors import UsageError
from bigdl.orca.learn import arguments
from bigdl.orca.learn.tf2 import Estimator

# every process that meets Keras first imports it, which takes long on a busy machine
pytestmark = pytest.mark.timeout(900)

ROWS = np.linspace(-1, 1, 24 * 4, dtype="float32").reshape(24, 4)
SUMS = ROWS.sum(1, keepdims=True)


def known(config):
    """A model that knows the shape of its input."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"])
    return model


@keras.saving.register_keras_serializable("tests")
class Scaled(keras.Model):
    """A subclassed model of an input of two parts."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(inputs["x"]) * inputs["scale"]


def shapeless(config):
    model = Scaled()
    model.compile("adam", "mse")
    return model


def parts(rows):
    return {"x": rows, "scale": np.full((len(rows), 1), 2, "float32")}


def pipeline(config, batch_size):
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((parts(ROWS), SUMS)).batch(batch_size)


def estimator(creator=known, **options):
    return Estimator.from_keras(model_creator=creator, backend="spark", **options)


def weights(est, **options):
    return est.get_model(**options).get_weights()


def activation(number):
    def identity(x):
        return x

    identity.__name__ = f"identity_{number}"
    return identity


def test_functions_of_all_layers_travel_with_an_instance():
    layers = [keras.layers.Dense(2, activation=activation(number)) for number in range(12)]
    model = keras.Sequential([keras.Input((2,)), *layers])
    model.compile("adam", "mse")
    est = Estimator.from_keras(model=model, backend="spark")
    for ours, known_weights in zip(weights(est), model.get_weights(), strict=True):
        assert (ours == known_weights).all()


def equal(one, other):
    return len(one) == len(other) and all(map(np.array_equal, one, other))


@pytest.fixture(scope="module")
def plain(orca_spark):
    """An Estimator of a model that knows its shapes, with weights of its own."""
    model = known({})
    model.set_weights([np.arange(4, dtype="float32")[:, None], np.ones(1, "float32")])
    return Estimator.from_keras(model=model, backend="spark")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder for checkpoints."""
    return str(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def fed(orca_spark, runs):
    """A subclassed model that a function of tf.data has fed."""
    est = estimator(shapeless, model_dir=runs)
    est.fit(pipeline, epochs=1, batch_size=8)
    return est


# -- models that do not know their shapes ----------------------------------------------------------


@pytest.mark.slow
def test_a_fit_on_a_dataset_tells_the_shapes_for_all_files(fed, runs, tmp_path):
    own = weights(fed)
    assert [w.shape for w in own] == [(4, 1), (1,)]
    for name in ("m.keras", "folder"):
        read = Estimator.from_keras(backend="spark")
        path = fed.save(checkpoint=str(tmp_path / name))  # as in BigDL 2.0
        read.load(checkpoint=path, sample_input=np.ones((1, 4)))
        assert equal(weights(read), own)
    fed.save_weights(str(tmp_path / "w.h5"))
    fed.save_checkpoint(str(tmp_path / "checkpoint"))
    for verb, path in (
        ("load_checkpoint", tmp_path / "checkpoint"),
        ("load_checkpoint", Estimator.latest_checkpoint(runs)),
    ):
        other = estimator(shapeless)
        getattr(other, verb)(str(path))
        assert equal(weights(other), own)
        assert int(other.get_model().optimizer.iterations) == 3


def test_a_row_tells_the_shapes_to_a_model_that_was_never_fitted(fed, tmp_path):
    path, own = fed.save_weights(str(tmp_path / "w.h5")), weights(fed)
    other = estimator(shapeless)
    with refused("model-unbuilt", "sample_input"):
        other.load_weights(path)
    other.load_weights(path, sample_input=parts(ROWS))
    assert equal(weights(other), own)  # it is remembered
    assert other.evaluate(pipeline, batch_size=8) == fed.evaluate(pipeline, batch_size=8)
    again = estimator(shapeless)
    other.save_checkpoint(str(tmp_path / "checkpoint"))
    again.load_checkpoint(str(tmp_path / "checkpoint"))
    assert equal(weights(again), own)


@pytest.mark.parametrize("verb", ["save", "save_weights", "save_checkpoint"])
def test_what_has_no_weights_yet_is_saved_with_a_row(orca_spark, tmp_path, verb):
    est, path = estimator(shapeless), str(tmp_path / "file.keras")
    with refused("model-unbuilt"):
        getattr(est, verb)(path)
    getattr(est, verb)(path, sample_input=parts(ROWS))
    other = estimator(shapeless)
    if verb == "save":
        other.load(path)
    elif verb == "save_weights":
        other.load_weights(path, sample_input=parts(ROWS))
    else:
        other.load_checkpoint(path)
    assert equal(weights(other), weights(est, sample_input=parts(ROWS)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([[1.0, 2.0]], ("data-type",)),
        (ROWS[:1], ("model-input", "sample_input")),
        (parts(ROWS[:, :3]), ("file-damaged",)),
    ],
    ids=["numbers", "another form", "another width"],
)
def test_rows_that_do_not_fit_are_refused(fed, tmp_path, row, message):
    path = fed.save_weights(str(tmp_path / "w.h5"))
    with refused(*message):
        estimator(shapeless).load_weights(path, sample_input=row)


def test_a_file_of_a_model_without_weights_is_refused(orca_spark, tmp_path):
    with pytest.warns(UserWarning, match="not yet been built"):
        shapeless({}).save(tmp_path / "m.keras")
    with refused("model-unbuilt"):
        Estimator.from_keras(backend="spark").load(str(tmp_path / "m.keras"))


# -- the forms of files ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "save_format", "kind"),
    [
        ("m", "h5", b"\x89HDF"),
        ("m", "keras", b"PK"),
        ("m.v1", "keras", b"PK"),
        ("m.hdf5", None, b"\x89HDF"),
        ("m.h5", "h5", b"\x89HDF"),
    ],
)
def test_a_file_is_read_by_its_content(plain, tmp_path, name, save_format, kind):
    path = plain.save(str(tmp_path / name), save_format=save_format)
    assert (tmp_path / name).read_bytes().startswith(kind)
    for given in (path, str(tmp_path / "renamed.keras")):
        other = Estimator.from_keras(backend="spark")
        other.load(given if given == path else str((tmp_path / name).rename(given)))
        assert equal(weights(other), weights(plain))


def test_weights_are_read_from_whole_models_too(plain, tmp_path):
    for name in ("m.keras", "m.h5"):
        other = estimator()
        other.load_weights(plain.save(str(tmp_path / name)))
        assert equal(weights(other), weights(plain))


@pytest.mark.parametrize(
    ("name", "save_format"), [("m.keras", "tf"), ("m.keras", "h5"), ("m.h5", "keras")]
)
def test_a_name_and_a_format_that_contradict_each_other_are_refused(
    plain, tmp_path, name, save_format
):
    with pytest.raises(UsageError, match=f"save_format='{save_format}' means a"):
        plain.save(str(tmp_path / name), save_format=save_format)
    assert not list(tmp_path.iterdir())


def test_a_folder_and_a_file_do_not_take_each_others_place(plain, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    for verb, options in (("save", {"save_format": "h5"}), ("save_weights", {})):
        with refused("path-exists"):
            getattr(plain, verb)(str(tmp_path / "folder"), **options)
    with refused("path-exists"):
        plain.save(str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "mine"
    assert not list((tmp_path / "folder").iterdir())


def test_what_cannot_be_loaded_is_told_in_one_sentence(plain, tmp_path):
    import tensorflow as tf

    folder = str(tmp_path / "saved")
    tf.saved_model.save(tf.Module(), folder)
    prefix = tf.train.Checkpoint(step=tf.Variable(1)).write(str(tmp_path / "prefix"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "text").write_text("no model")
    for verb, path, message in (
        ("load", folder, "is a SavedModel, which Keras 3 cannot load as a model; load it with"),
        ("load", tmp_path / "empty", "the folder has no model.keras; use load_checkpoint"),
        ("load", tmp_path / "text", "neither a Keras nor an HDF5 file"),
        ("load", tmp_path / "nothing", "cannot be read"),
        ("load_weights", prefix, "a TensorFlow checkpoint, which Keras 3 does not read"),
        ("load_weights", tmp_path / "empty", "it is a folder; use load"),
        ("load_weights", tmp_path / "text", "neither a Keras nor an HDF5 file"),
        ("load_weights", tmp_path / "nothing", "cannot be read"),
    ):
        with pytest.raises(UsageError, match=message):
            getattr(estimator(), verb)(str(path))


def test_arguments_of_files_are_checked_or_named_as_idle(plain, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(arguments, "warned_texts", set())
    for verb in ("save", "save_weights"):
        with refused("argument-value", "save_format"):
            getattr(plain, verb)(str(tmp_path / "m"), save_format="banana")
    with caplog.at_level(logging.WARNING, "bigdl.orca"):
        for _ in range(2):
            plain.save(str(tmp_path / "m.keras"), signatures=print, options=object())
            plain.save_weights(str(tmp_path / "w"), save_format="tf")
    said = [record.getMessage() for record in caplog.records if record.name == "bigdl.orca"]
    assert [text.split(")")[0] for text in said] == [
        "save(signatures=",
        "save(options=",
        'save_weights(save_format="tf"',
    ]
