"""Tests of Keras recommender models: shapes, unknown ids, convergence and files."""

import numpy as np
import pytest
from refusals import refused

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
        "seen": Feature("int", 9, shape=(3,)),
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
TASKS = ["young", "old", "first"]  # not in the order of the alphabet


def mmoe(**options):
    return models.mmoe(SCHEMA, ["user", "item"], ["price"], TASKS, dim=8, **options)


def two_tower(**options):
    return models.two_tower(SCHEMA, ["user"], ["item"], (), ["price"], ["seen"], dim=8, **options)


def rows(count=256, seed=0):
    """Generate columns, and a label that the product of user and item decides."""
    rng = np.random.default_rng(seed)
    columns = {name: rng.integers(0, SCHEMA.cardinality(name), count) for name in ("user", "item")}
    columns["cross"] = rng.integers(0, 50, count)
    columns["price"] = rng.random(count).astype("float32")
    columns["seen"] = rng.integers(0, 9, (count, 3))
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


@pytest.mark.parametrize("name", [*MODELS, "mmoe", "two tower"])
def test_a_number_that_was_not_there_stands_for_the_unknown_one(name):
    keras.utils.set_random_seed(1)
    model = {**MODELS, "mmoe": mmoe, "two tower": two_tower}[name]()
    columns, _ = rows(6)
    known = {**columns, "user": np.array([0, 0, 0, 3, 3, 3])}
    other = {**columns, "user": np.array([-1, 12, 99, 3, 3, 3])}
    found = [keras.tree.flatten(model(inputs_of(model, each))) for each in (known, other)]
    for pair in zip(*found, strict=True):
        np.testing.assert_array_equal(*map(keras.ops.convert_to_numpy, pair))


def sharded(name):
    """Build the model of this name with sharded embeddings."""
    makers = {
        "ncf": lambda: models.ncf(SCHEMA, factors=4, hidden=(16, 8), sharded=True),
        "wide and deep": lambda: models.wide_and_deep(
            SCHEMA, ["cross", "user"], ["user", "item"], ["price"], 4, (16,), sharded=True
        ),
        "deepfm": lambda: models.deepfm(
            SCHEMA, ["user", "item"], ["price"], dim=4, hidden=(16,), sharded=True
        ),
        "mmoe": lambda: mmoe(sharded=True),
        "two tower": lambda: two_tower(sharded=True),
    }
    return makers[name]()


@pytest.mark.parametrize("name", ["ncf", "wide and deep", "deepfm", "mmoe", "two tower"])
def test_sharded_embeddings_are_the_same_model(name):
    """Test that a sharded table holds the rows of all columns, one table after the other."""
    keras.utils.set_random_seed(1)
    model, other = {**MODELS, "mmoe": mmoe, "two tower": two_tower}[name](), sharded(name)

    def weights(each, *, are_tables):
        return [w for w in each.weights if w.path.endswith("/embeddings") == are_tables]

    for mine, theirs in zip(
        weights(other, are_tables=False), weights(model, are_tables=False), strict=True
    ):
        mine.assign(theirs)
    tables = map(keras.ops.convert_to_numpy, weights(model, are_tables=True))
    for mine in weights(other, are_tables=True):
        whole = next(tables)
        while len(whole) < mine.shape[0]:
            whole = np.concatenate([whole, next(tables)])
        mine.assign(whole)
    columns, _ = rows(6)
    found = [keras.tree.flatten(each(inputs_of(each, columns))) for each in (model, other)]
    for pair in zip(*found, strict=True):
        np.testing.assert_allclose(*map(keras.ops.convert_to_numpy, pair), rtol=1e-5)


@pytest.mark.slow
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


@pytest.mark.slow
def test_tasks_are_outputs_in_the_order_of_their_targets(tmp_path):
    keras.utils.set_random_seed(3)
    model = mmoe(experts=3, expert_hidden=(16,), tower_hidden=(8,))
    columns, _ = rows(1024)
    is_so = columns["user"] < 6, columns["user"] >= 6, columns["item"] < 4
    targets = [each.astype("float32") for each in is_so]
    metrics = [["accuracy"]] * 3
    model.compile(
        keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=metrics, jit_compile=False
    )
    given = inputs_of(model, columns)
    model.fit(given, targets, epochs=12, batch_size=128, verbose=0)
    found = model.predict(given, verbose=0)
    for task, target, chance in zip(TASKS, targets, found, strict=True):
        assert chance.shape == (1024, 1)
        assert ((chance[:, 0] > 0.5) == target).mean() > 0.9, task
    assert {f"{task}_accuracy" for task in TASKS} <= set(
        model.evaluate(given, targets, verbose=0, return_dict=True)
    )
    shares = keras.Model(model.input, model.get_layer("young_gate").output).predict(
        given, verbose=0
    )
    assert shares.shape == (1024, 3)
    np.testing.assert_allclose(shares.sum(1), 1, rtol=1e-5)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras").predict(given, verbose=0)
    for pair in zip(loaded, found, strict=True):
        np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_two_towers_learn_what_a_user_chooses_and_predict_on_their_own(tmp_path):
    keras.utils.set_random_seed(4)
    model = two_tower(hidden=(16,))
    columns, _ = rows(1024)
    columns["item"] = 1 + (3 * columns["user"]) % 8
    given = inputs_of(model, columns)
    counts = np.bincount(columns["item"], minlength=9)
    loss = models.InBatchSoftmax(0.15, counts)
    model.compile(keras.optimizers.Adam(0.02), loss, jit_compile=False)
    before = model.evaluate(given, columns["item"], batch_size=128, verbose=0)
    model.fit(given, columns["item"], epochs=12, batch_size=128, verbose=0)
    after = model.evaluate(given, columns["item"], batch_size=128, verbose=0)
    assert after < 0.7 * before
    both = model.predict(given, verbose=0)
    assert both.shape == (1024, 2, 8)
    np.testing.assert_allclose(np.linalg.norm(both, axis=2), 1, rtol=1e-4)
    towers = [model.get_layer(f"{side}_tower") for side in ("user", "item")]
    alone = [tower.predict(inputs_of(tower, columns), verbose=0) for tower in towers]
    np.testing.assert_allclose(np.stack(alone, 1), both, rtol=1e-4, atol=1e-6)
    model.save(tmp_path / "model.keras")
    for options in ({}, {"compile": False}):
        loaded = keras.saving.load_model(tmp_path / "model.keras", **options)
        np.testing.assert_allclose(loaded.predict(given, verbose=0), both, rtol=1e-4, atol=1e-6)
    assert loaded.get_layer("item_tower").output.shape == (None, 8)


def test_padding_says_nothing_about_a_user():
    keras.utils.set_random_seed(5)
    tower = two_tower().get_layer("user_tower")
    user = np.array([4, 4])
    short = tower.predict({"user": user, "seen": np.array([[7, 2], [3, 0]])}, verbose=0)
    padded = {"user": user, "seen": np.array([[7, 0, 2, 0], [0, 0, 0, 3]])}
    np.testing.assert_allclose(tower.predict(padded, verbose=0), short, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("counts", [None, [0, 5, 1, 40, 2, 9, 1, 3, 7]])
def test_the_loss_of_two_towers_is_that_of_pytorch(counts):
    torch = pytest.importorskip("torch")
    from bigdl.friesian.models import InBatchSoftmax

    rng = np.random.default_rng(6)
    vectors = rng.normal(size=(10, 2, 4)).astype("float32")
    number = rng.integers(0, 9, 10)  # some occur twice
    user, item = map(torch.from_numpy, (vectors[:, 0], vectors[:, 1]))
    wanted = float(InBatchSoftmax(0.2, counts)(user, item, torch.from_numpy(number)))
    found = models.InBatchSoftmax(0.2, counts)(number, vectors)
    assert float(keras.ops.convert_to_numpy(found)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: models.deepfm(SCHEMA, [], ["price"]), ("argument-missing",)),
        (lambda: models.wide_and_deep(SCHEMA, [], ["user"]), ("argument-missing",)),
        (lambda: models.wide_and_deep(SCHEMA, ["user"], []), ("argument-missing",)),
        (lambda: models.deepfm(SCHEMA, ["user"], ["city"]), ("data-dtype",)),
        (lambda: models.ncf(SCHEMA, user="nobody"), ("column-missing", "'nobody'")),
        (lambda: models.mmoe(SCHEMA, ["user"], tasks="like"), ("argument-type",)),
        (lambda: models.mmoe(SCHEMA, ["user"], tasks=["a", "a"]), ("column-duplicate", "'a'")),
        (lambda: models.mmoe(SCHEMA, ["user"], tasks=["user"]), ("column-duplicate", "'user'")),
        (lambda: models.mmoe(SCHEMA, []), ("argument-missing",)),
        (lambda: models.two_tower(SCHEMA, ["user"], []), ("argument-missing",)),
        (lambda: models.two_tower(SCHEMA, ["user"], ["user"]), ("column-duplicate", "'user'")),
        (lambda: models.InBatchSoftmax(0), ("argument-value", "0")),
    ],
)
def test_columns_that_do_not_fit_are_refused(make, message):
    with refused(*message):
        make()
