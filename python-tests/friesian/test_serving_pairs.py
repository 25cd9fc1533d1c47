"""Tests that a split model gives the scores of the whole model, also during changes."""

import numpy as np
import pytest
import torch
from served_catalogue import (
    BEST,
    CANDIDATES,
    catalogue_index,
    catalogue_store,
    items_frame,
    random_users,
    users_frame,
)

from bigdl.friesian.feature import FeaturePipeline
from bigdl.friesian.models import DIEN, DLRM, NCF, DeepFM, MMoE, Tower, TwoTower, WideAndDeep
from bigdl.friesian.serving import (
    EmbeddedStore,
    IndexRecall,
    Recommender,
    ServedRanker,
)
from bigdl.nano.openvino import SplitError
from bigdl.nano.serving import ModelRepository, ServedModel

CATEGORIES = {"age": 100, "kind": 9, "item": 1300}


def perturbed(module, seed=0):
    """Scale up the weights of a module, so that the scores of items differ."""
    torch.manual_seed(seed)
    for each in module.parameters():
        torch.nn.init.normal_(each, std=0.4)
    return module.eval()


def deepfm(seed=0):
    return perturbed(DeepFM(CATEGORIES, ["price"], dim=4, hidden=(8, 4)), seed)


SAMPLE = (
    torch.zeros(2, dtype=torch.int32),
    torch.zeros(2, dtype=torch.int8),
    torch.zeros(2, dtype=torch.int64),
    torch.zeros(2),
)


@pytest.fixture(scope="module")
def model():
    with ServedModel(deepfm(), sample=SAMPLE, thread_num=1) as made:
        yield made


@pytest.fixture(scope="module")
def catalogue():
    return users_frame(), items_frame()


@pytest.fixture(scope="module")
def index(catalogue):
    return catalogue_index(catalogue)


@pytest.fixture
def store(catalogue, tmp_path):
    return catalogue_store(tmp_path / "store", catalogue)


def both(store, index, ranker, **options):
    """Build a recommender with a split model, and one with the whole model."""
    recall = IndexRecall(store, index, seen_col="seen")
    options = {"candidates": CANDIDATES, "popular": [3]} | options
    split, whole = (Recommender(store, recall, ranker, split=s, **options) for s in (True, False))
    split.warm_up()
    return split, whole


def is_split(recommender):
    """Return True if the model is split and the first request has confirmed its scores."""
    recommender.recommend([1, 3], BEST)
    models = recommender._features.pairs().split_models
    return [*models.values()][-1] is not None and [*models.values()][-1].is_checked


def check_equal(split, whole, users):
    for ours, theirs in zip(
        split.recommend(users, BEST), whole.recommend(users, BEST), strict=True
    ):
        assert (ours.user_id, ours.source) == (theirs.user_id, theirs.source)
        np.testing.assert_allclose(ours.scores, theirs.scores, rtol=1e-4, atol=1e-6)
        if (np.diff(-theirs.scores) > 1e-5).all():  # else rounding may choose
            assert ours.item_ids[:-1].tolist() == theirs.item_ids[:-1].tolist()


@pytest.mark.slow
def test_answers_equal_those_of_the_whole_model(store, index, model):
    """Test 10,000 users with repeated and unknown ones, in any order."""
    split, whole = both(store, index, model)
    assert is_split(split)
    users = random_users(10_000)
    for start in range(0, len(users), 500):
        check_equal(split, whole, users[start : start + 500].tolist())


def test_updated_added_and_removed_items_are_those_of_the_store(store, index, model, catalogue):
    split, whole = both(store, index, model)
    assert is_split(split)
    users, items = random_users(100).tolist(), catalogue[1].drop(columns="vector")
    before = [each.scores.tolist() for each in split.recommend(users, BEST)]
    changed = items.iloc[::2].assign(price=lambda frame: 5 + frame["price"])
    store.update({"item": changed})
    check_equal(split, whole, users)
    assert [each.scores.tolist() for each in split.recommend(users, BEST)] != before
    store.update({"item": changed.iloc[::3].assign(kind=np.int8(1))})
    check_equal(split, whole, users)
    store.delete("item", items["item"].iloc[:50])  # these items get the default features
    check_equal(split, whole, users)
    store.replace({"user": catalogue[0], "item": items.assign(price=np.float32(0.5))})
    check_equal(split, whole, users)
    store.rollback()
    check_equal(split, whole, users)


def test_a_table_that_would_be_too_large_is_not_kept(store, index, model):
    split, whole = both(store, index, model, item_memory=1000)
    assert is_split(split)
    check_equal(split, whole, random_users(100).tolist())


@pytest.mark.parametrize("user_memory", [0, 2000, 1 << 20])
def test_users_are_kept_until_they_change(store, index, model, catalogue, user_memory):
    split, whole = both(store, index, model, user_memory=user_memory)
    assert is_split(split)
    users = random_users(100)
    reads = []
    for _ in range(2):
        check_equal(split, whole, users.tolist())
        kept = [*split._features.pairs().split_models.values()][-1].users_kept
        reads.append({place for memory in kept.values() for place in memory.kept})
        assert all(memory.bytes_kept <= user_memory for memory in kept.values())
    known = {1, 3, *users.tolist()} & set(catalogue[0]["user"].tolist())
    assert len(reads[1]) == len(known) if user_memory > 2000 else len(reads[1]) < len(known)
    frame = catalogue[0].copy()
    frame["age"] = 100 - frame["age"]
    store.update({"user": frame.iloc[::2]})
    check_equal(split, whole, users.tolist())
    store.delete("user", frame["user"].iloc[:50])
    check_equal(split, whole, users.tolist())
    store.replace({"user": frame, "item": catalogue[1].drop(columns="vector")})
    check_equal(split, whole, users.tolist())
    store.rollback()
    check_equal(split, whole, users.tolist())


@pytest.mark.slow
def test_a_new_model_answers_with_its_own_values(store, index):
    with ModelRepository() as repository:
        repository.add("ranker", ServedModel(deepfm(), sample=SAMPLE, thread_num=1))
        split, whole = both(store, index, ServedRanker(repository, "ranker"))
        assert is_split(split)
        users = random_users(100).tolist()
        before = [each.scores.tolist() for each in split.recommend(users, BEST)]
        repository.add("ranker", ServedModel(deepfm(seed=1), sample=SAMPLE, thread_num=1))
        check_equal(split, whole, users)  # by the whole model, until the parts are ready
        split.warm_up()
        assert is_split(split)
        check_equal(split, whole, users)
        assert [each.scores.tolist() for each in split.recommend(users, BEST)] != before


@pytest.mark.slow
def test_a_pipeline_makes_the_inputs_of_each_side(tmp_path, catalogue, index):
    users, items = (each.rename(columns={"kind": "sort"}) for each in catalogue)
    items = items.drop(columns="vector")
    pairs = users.iloc[:200].merge(items.iloc[:200], how="cross")
    pairs[["city", "sort", "price", "age"]].to_parquet(tmp_path / "pairs.parquet")
    pipeline = FeaturePipeline().category_encode(["city", "sort"]).fillna(0, ["city", "sort"])
    pipeline = pipeline.min_max_scale("price")
    pipeline = pipeline.fit_files(str(tmp_path / "pairs.parquet"), host="here")
    store = EmbeddedStore(tmp_path / "store")
    store.replace({"user": users, "item": items})
    module = perturbed(DeepFM({"city": 10, "sort": 10}, ["price"], dim=4, hidden=(8,)))
    sample = torch.zeros(2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(2)
    with ServedModel(module, sample=sample, thread_num=1) as model:
        split, whole = both(store, index, model, pipeline=pipeline)
        assert is_split(split)
        check_equal(split, whole, random_users(200).tolist())
        crossed = pipeline_of_both(tmp_path)
        mixed, alone = both(store, index, model, pipeline=crossed, inputs=["city", "sort", "price"])
        assert mixed._features.pairs() is None
        check_equal(mixed, alone, random_users(50).tolist())


def pipeline_of_both(folder):
    """Return a pipeline with a column that depends on a user and an item column."""
    crossed = FeaturePipeline().category_encode(["city", "sort"]).fillna(0, ["city", "sort"])
    crossed = crossed.cross_columns([["city", "sort"]], [9]).select(["city_sort", "sort", "price"])
    crossed = crossed.rename({"city_sort": "city"})
    return crossed.fit_files(str(folder / "pairs.parquet"), host="here")


class OfAllRows(torch.nn.Module):
    """Module whose score of a row depends on the other rows."""

    feature_cols = ("age", "price")

    def forward(self, age, price):
        return torch.softmax(price * age.to(torch.float32), 0)


@pytest.mark.slow
def test_a_model_whose_rows_depend_on_each_other_stays_whole(store, index):
    sample = torch.ones(2, dtype=torch.int32), torch.rand(2)
    with ServedModel(OfAllRows(), sample=sample, input_names=["age", "price"]) as model:
        split, whole = both(store, index, model)
        assert not is_split(split)
        check_equal(split, whole, random_users(20).tolist())
        with pytest.raises(SplitError, match="rows of the model depend on each other"):
            model.split(["age"])
        with pytest.raises(SplitError, match=r"no inputs \['size'\]"):
            model.split(["size"])
    with (
        ServedModel(NCF(5, 5), sample=(torch.ones(2).int(),) * 2, method="original") as model,
        pytest.raises(SplitError, match="only one in OpenVINO"),
    ):
        model.split(["user"])


SIZES = {"u1": 40, "u2": 30, "i1": 40, "i2": 20}
MODELS = {
    "DeepFM": lambda: DeepFM(SIZES, ["ux", "ix"], dim=8, hidden=(16, 8)),
    "DLRM": lambda: DLRM(SIZES, ["ux", "ix"], dim=8, hidden=(16, 8)),
    "interleaved columns": lambda: DeepFM({"i1": 40, "u1": 40, "i2": 20, "u2": 30}, hidden=(16,)),
    "WideAndDeep": lambda: WideAndDeep({"u1": 40, "i1": 40}, SIZES, ["ux", "ix"], hidden=(16, 8)),
    "NCF": lambda: NCF(40, 40, user="u1", item="i1"),
    "MMoE": lambda: MMoE(SIZES, ["ux", "ix"], ["click", "buy"]),
    "TwoTower": lambda: TwoTower(Tower({"u1": 40}, ["ux"]), Tower({"i1": 40}, ["ix"])),
    "DIEN": lambda: DIEN({"i1": 40}, ["u_history"], "u_mask", profile={"u2": 30}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_parts_of_every_model_give_its_scores(name):
    module = perturbed(MODELS[name]())
    rng = np.random.default_rng(3)

    def column(of, rows):
        if of == "u_mask":
            return np.tile(np.array([1, 1, 1, 0, 0], np.float32), (rows, 1))
        if of == "u_history":
            return rng.integers(0, 40, (rows, 5))
        if of.endswith("x"):
            return rng.random(rows).astype(np.float32)
        return rng.integers(0, 20, rows).astype(np.int32)

    columns = module.feature_cols
    sample = tuple(torch.from_numpy(column(each, 4)) for each in columns)
    with ServedModel(module, sample=sample, thread_num=1) as model:
        names = [each.name for each in model.signature.inputs]
        common = [each for each in names if columns[names.index(each)].startswith("u")]
        split = model.split(common)
        rows = 50
        of_user = [column(each, 1) for each in columns if each.startswith("u")]
        of_item = [column(each, rows) for each in columns if not each.startswith("u")]
        users, items = iter(of_user), iter(of_item)
        whole = [
            np.repeat(next(users), rows, axis=0) if each.startswith("u") else next(items)
            for each in columns
        ]
        expected = model.call(model.signature.arrays(dict(zip(names, whole, strict=True))))
        kept = split.own(of_item)
        assert kept.shape == (rows, split.width)
        found = split.joint(split.common(of_user), kept)
        for ours, theirs in zip(found, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_rows_of_a_store_are_the_same_objects_until_they_change(store, catalogue):
    layout, (base,) = store.parts("item")
    assert layout.id_column == "item"
    store.update({"item": catalogue[1].drop(columns="vector").iloc[:2]})
    again, changed = store.parts("item")[1]
    assert again is base
    assert len(changed) == 2
