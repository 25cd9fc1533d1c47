"""Models of recommenders in Keras: shapes, unknown numbers, what they learn, files."""

import numpy as np
import pytest

from bigdl.common.errors import UsageError
from bigdl.friesian.feature import Feature, FeatureSchema

keras = pytest.importorskip("keras")

from bigdl.friesian.models import keras as models  # noqa: E402

SCHEMA = FeatureSchema(
    {
        "user": Feature("int", 12),
        "item": Feature("int", 9),
        "cross": Feature("int", 50),
        "price": Feature("float"),
        "city": Feature("string"),
    }
)
MODELS = {
    "ncf": lambda: models.ncf(SCHEMA, factors=4, hidden=(16, 8)),
    "wide and deep": lambda: models.wide_and_deep(
        SCHEMA, ["cross", "user"], ["user", "item"], ["price"], dim=4, hidden=(16,)
    ),
    "deepfm": lambda: models.deepfm(SCHEMA, ["user", "item"], ["price"], dim=4, hidden=(16,)),
    "deepfm without numbers": lambda: models.deepfm(SCHEMA, ["user", "item"], dim=4, hidden=(8,)),
}


def rows(count=256, seed=0):
    """Columns, and a label that the product of user and item decides."""
    rng = np.random.default_rng(seed)
    columns = {name: rng.integers(0, SCHEMA.cardinality(name), count) for name in ("user", "item")}
    columns["cross"] = rng.integers(0, 50, count)
    columns["price"] = rng.random(count).astype("float32")
    return columns, ((columns["user"] + columns["item"]) % 2).astype("float32")


def inputs_of(model, columns):
    return {name: columns[name] for name in model.input}


@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_a_probability_for_each_row(name):
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    columns, _ = rows(5)
    found = keras.ops.convert_to_numpy(model(inputs_of(model, columns)))
    assert found.shape == (5, 1)
    assert ((found > 0) & (found < 1)).all()


@pytest.mark.parametrize("name", MODELS)
def test_a_number_that_was_not_there_stands_for_the_unknown_one(name):
    keras.utils.set_random_seed(1)
    model = MODELS[name]()
    columns, _ = rows(6)
    known = {**columns, "user": np.array([0, 0, 0, 3, 3, 3])}
    other = {**columns, "user": np.array([-1, 12, 99, 3, 3, 3])}
    found = [keras.ops.convert_to_numpy(model(inputs_of(model, each))) for each in (known, other)]
    np.testing.assert_array_equal(*found)


def test_products_of_users_and_items_are_learned_and_files_need_no_bigdl(tmp_path):
    keras.utils.set_random_seed(2)
    model = models.deepfm(SCHEMA, ["user", "item"], ["price"], dim=8, hidden=(32,))
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
    columns, label = rows(1024)
    given = inputs_of(model, columns)
    model.fit(given, label, epochs=12, batch_size=128, verbose=0)
    assert model.evaluate(given, label, verbose=0, return_dict=True)["accuracy"] > 0.95
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(
        loaded.predict(given, verbose=0), model.predict(given, verbose=0), rtol=1e-5
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.deepfm(SCHEMA, [], ["price"]), "categories has no columns"),
        (lambda: models.wide_and_deep(SCHEMA, [], ["user"]), "wide has no columns"),
        (lambda: models.wide_and_deep(SCHEMA, ["user"], []), "The model has no columns"),
        (lambda: models.deepfm(SCHEMA, ["user"], ["city"]), "city should hold numbers"),
        (lambda: models.ncf(SCHEMA, user="nobody"), "The schema has no column 'nobody'"),
    ],
)
def test_columns_that_do_not_fit_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()
