"""Tests of sequence models: losses, causality, caches, workers and recommendations."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refused
from torch.nn import functional as F

from bigdl.friesian.baselines import Popular, cross_validate
from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.models.sequences import (
    HSTU,
    BERT4Rec,
    BinaryNextItem,
    GRU4Rec,
    ItemVectors,
    SampledSoftmax,
    SASRec,
    chunked_cross_entropy,
)
from bigdl.friesian.models.sequences.one_event import OneEventModel
from bigdl.friesian.sequential import SequenceRecommender
from bigdl.friesian.splitters import LastN
from bigdl.orca.learn.metrics import MRR, NDCG, HitRate
from bigdl.orca.learn.pytorch import Estimator

CAUSAL = {
    "sasrec": SASRec,
    "ligr": lambda *sizes, **options: SASRec(*sizes, block="ligr", heads=2, **options),
    "hstu": HSTU,
    "gru4rec": GRU4Rec,
}


def clicks(rows: int = 500, users: int = 25, items: int = 20) -> pd.DataFrame:
    """Return clicks with equal times, in which a user's next item often follows the last one."""
    random = np.random.default_rng(0)
    item = random.integers(0, items, users)
    result = []
    for row in range(rows):
        user = int(random.integers(users))
        jump = 1 if random.random() < 0.9 else int(random.integers(items))
        item[user] = (item[user] + jump) % items
        result.append((user, f"i{item[user]:02}", 1_700_000_000 + row // 3))
    return pd.DataFrame(result, columns=["user", "item", "time"])


def histories(model, random, rows: int = 6):
    """Return random columns for a model, with different lengths."""
    lengths = torch.randint(1, model.max_len + 1, (rows, 1), generator=random)
    kept = torch.arange(model.max_len) < lengths
    items = torch.randint(1, 20, (rows, model.max_len), generator=random) * kept
    steps = torch.randint(1, 10**6, items.shape, generator=random)
    times = (1_700_000_000 + steps.cumsum(1)) * kept
    return [items, times] if model.uses_times else [items]


# -- losses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [3, 7, 100])
def test_cross_entropy_in_chunks_equals_that_over_all_items(chunk, dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(30, 8, dtype=dtype), torch.randn(50, 8, dtype=dtype)
    target, outer = torch.randint(50, (30,)), torch.rand(30, dtype=dtype)
    results = []
    for loss in (
        lambda h, w: F.cross_entropy(h @ w.T, target, reduction="none"),
        lambda h, w: chunked_cross_entropy(h, w, target, chunk),
    ):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        losses = loss(*leaves)
        (losses * outer).sum().backward()
        results.append([losses.detach(), *(each.grad for each in leaves)])
    for full, chunked in zip(*results, strict=True):
        scale = 1e-6 if dtype is torch.float32 else 1e-14
        torch.testing.assert_close(chunked, full, rtol=0, atol=scale * float(full.abs().max()))


def test_sampled_softmax_by_frequency_estimates_the_full_one():
    torch.manual_seed(0)
    items, hidden = ItemVectors(30, 4), torch.randn(200, 4)
    torch.nn.init.normal_(items.table.weight)
    target = torch.randint(1, 30, (200,))
    counts = np.arange(30) + 5
    loss = SampledSoftmax(20_000, item_counts=counts)
    step = torch.tensor(1)
    sampled = loss(hidden, target, items, torch.arange(200), step)
    full = F.cross_entropy(hidden @ items.matrix()[1:].T, target - 1, reduction="none")
    torch.testing.assert_close(sampled, full, rtol=0.05, atol=0.05)


def test_binary_losses_follow_their_formula_and_leave_out_hits():
    items = ItemVectors(3, 2)  # ids 1 and 2, so the negatives of 1 are 1 or 2
    torch.nn.init.normal_(items.table.weight)
    hidden, target = torch.randn(1, 2), torch.tensor([1])
    positive, negative = (hidden @ items.matrix()[1:].T)[0].tolist()
    for seed in range(8):
        keys = torch.tensor([seed])
        loss = BinaryNextItem(1)(hidden, target, items, keys, torch.tensor(0)).item()
        plain = -np.log(1 / (1 + np.exp(-positive)))
        both = plain - np.log(1 - 1 / (1 + np.exp(-negative)))
        assert min(abs(loss - plain / 2), abs(loss - both / 2)) < 1e-5
    # with t = 1 the exponent of the positive is K / (N - 1): 10 negatives of 100
    items, keys = ItemVectors(102, 2), torch.zeros(1, dtype=torch.int64)
    arguments = hidden, target, items, keys, torch.tensor(0)
    plain, calibrated = (BinaryNextItem(10, calibration=t)(*arguments) for t in (0, 1))
    expected = 0.9 * F.softplus(-(hidden * items(target)).sum()) / 11
    torch.testing.assert_close((plain - calibrated)[0], expected)


# -- networks --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CAUSAL)
def test_no_position_reads_the_future(name):
    random = torch.Generator().manual_seed(0)
    model = CAUSAL[name](20, 8, 8).eval()
    columns = histories(model, random)
    before, _ = model.extend(*columns)
    for position in range(1, 8):
        changed = [each.clone() for each in columns]
        changed[0][:, position:] = torch.randint(1, 20, changed[0][:, position:].shape)
        for times in changed[1:]:
            times[:, position:] += 12345
        after, _ = model.extend(*changed)
        torch.testing.assert_close(after[:, :position], before[:, :position], rtol=0, atol=1e-6)
        assert not torch.allclose(after[:, position:], before[:, position:])


def test_bert4rec_predicts_from_the_history_only():
    model = BERT4Rec(20, 4, 8).eval()
    alone = model(torch.tensor([[3, 5, 0, 0]]))
    batch = model(torch.tensor([[3, 5, 0, 0], [3, 5, 7, 9]]))
    torch.testing.assert_close(batch[:1], alone)
    assert not torch.allclose(batch[1], alone[0])


@pytest.mark.parametrize("name", CAUSAL)
def test_events_added_to_a_cache_equal_the_whole_history(name):
    random = torch.Generator().manual_seed(1)
    model = CAUSAL[name](20, 8, 8).eval()
    columns = histories(model, random)
    columns[0].clamp_(min=1)
    whole, _ = model.extend(*columns)
    parts, cache, start = [], None, 0
    for length in (3, 1, 1, 2, 1):
        new = [each[:, start : start + length] for each in columns]
        rows, cache = model.extend(*new, cache=cache)
        parts.append(rows)
        start += length
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-5)
    with refused("data-size", "max_len=8"):
        model.extend(*new, cache=cache)


OF_ITEMS = np.random.default_rng(0).normal(size=(20, 3))
READ = [
    (name, options)
    for name in ("sasrec", "ligr", "hstu")
    for options in (
        {},
        {"heads": 2, "cosine": True},
        {"item_features": np.arange(20)[:, None] % 3},
        {"item_vectors": OF_ITEMS},
    )
]


@pytest.mark.parametrize(("name", "options"), [*READ, ("hstu", {"use_times": False})])
def test_events_read_one_by_one_in_numpy_give_the_vectors_of_the_whole_history(name, options):
    torch.manual_seed(0)
    options = {"heads": 1, **options} | ({"block": "ligr"} if name == "ligr" else {})
    model = (HSTU if name == "hstu" else SASRec)(20, 40, 8, **options).eval()
    for parameter in model.parameters():  # biases and norms start with constants
        torch.nn.init.normal_(parameter, std=0.5)
    ids = torch.randint(1, 20, (2, 40))
    times = (torch.rand(2, 40) * 1e8).long().sort().values + 1_700_000_000
    with torch.inference_mode():
        whole, _ = model.extend(ids, times)
        _, batch = model.extend(ids[:, :5], times[:, :5])
    reader = OneEventModel.of(model)
    first = reader.state_of(batch, 1, 5)
    columns = ids[1].numpy(), times[1].numpy()
    state = first
    for length in range(6, 41):
        vector, state = reader.extend(state, *(each[:length] for each in columns))
        np.testing.assert_allclose(vector, whole[1, length - 1], rtol=1e-4, atol=1e-4)
    # a second request that extends the same state gets rows of its events only
    other = [each.copy() for each in columns]
    other[0][5:] = 1 + other[0][5:] % 19
    with torch.inference_mode():
        expected, _ = model.extend(*(torch.from_numpy(each)[None] for each in other))
    for events, wanted in ((other, expected[0, 7]), (columns, whole[1, 7])):
        vector, _ = reader.extend(first, *(each[:8] for each in events))
        np.testing.assert_allclose(vector, wanted, rtol=1e-4, atol=1e-4)


def test_threads_may_extend_one_state_in_numpy():
    torch.manual_seed(0)
    model = SASRec(20, 40, 8).eval()
    ids = torch.randint(1, 20, (8, 40))
    ids[:, :5] = ids[0, :5]  # all threads have these events in common
    with torch.inference_mode():
        whole, _ = model.extend(ids)
        _, batch = model.extend(ids[:1, :5])
    reader = OneEventModel.of(model)
    state, start = reader.state_of(batch, 0, 5), threading.Barrier(8)

    def read(row):
        start.wait()
        return reader.extend(state, ids[row].numpy(), np.zeros(40, np.int64))[0]

    with ThreadPoolExecutor(8) as threads:
        vectors = list(threads.map(read, range(8)))
    np.testing.assert_allclose(vectors, whole[:, -1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["sasrec", "ligr", "hstu"])
def test_weights_changed_in_place_are_read_in_numpy(name):
    torch.manual_seed(0)
    model = CAUSAL[name](20, 8, 8).eval()
    reader = OneEventModel.of(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    ids, times = torch.randint(1, 20, (1, 6)), torch.arange(6)[None] * 1000
    with torch.inference_mode():
        whole, _ = model.extend(ids, times)
        _, batch = model.extend(ids[:, :5], times[:, :5])
    vector, _ = reader.extend(reader.state_of(batch, 0, 5), ids[0].numpy(), times[0].numpy())
    np.testing.assert_allclose(vector, whole[0, -1], rtol=1e-4, atol=1e-4)


def test_derived_classes_are_not_read_in_numpy():
    class Changed(SASRec):
        pass

    assert OneEventModel.of(SASRec(20, 8, 8)) is not None
    assert OneEventModel.of(Changed(20, 8, 8)) is None
    assert OneEventModel.of(GRU4Rec(20, 8, 8)) is None


def test_features_and_vectors_are_added_to_the_vectors_of_items():
    vectors = np.random.default_rng(0).normal(size=(5, 3))
    items = ItemVectors(5, 4, features=[[0, 0], [1, 2], [1, 1], [2, 0], [2, 1]], vectors=vectors)
    torch.testing.assert_close(items(torch.arange(5)), items.matrix())
    items.table.weight.data.zero_()
    with torch.no_grad():
        expected = items.of_features.weight[[1, 3 + 2]].sum(0)
        expected += items.projection.weight @ torch.tensor(vectors[1], dtype=torch.float32)
    torch.testing.assert_close(items.matrix()[1], expected)
    with refused("data-shape", "features"):
        ItemVectors(6, 4, features=[[0], [1]])


# -- training --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def table(orca_spark):
    return FeatureTable.from_pandas(clicks())


def test_sequences_of_spark_have_each_event_once_as_a_target(table):
    rows = clicks().sort_values(["user", "time", "item"])
    made = table.sequences(max_len=4, windows="all")
    names = [None, *made.items.to_pylist()]
    pairs = [
        (row.user, names[item], time, names[following])
        for row in made.df.collect()
        for item, time, following in zip(row.item_seq, row.time_seq, row.next_seq, strict=True)
        if item
    ]
    following = rows.groupby("user")["item"].shift(-1)
    expected = rows.assign(following=following).dropna()
    assert sorted(pairs) == sorted(expected.itertuples(index=False, name=None))
    for row in made.histories.collect():
        own = rows[rows["user"] == row.user]
        kept = [names[item] for item in row.item_seq if item]
        assert kept == own["item"].tolist()[-4:]
        assert {names[item] for item in row.seen} == set(own["item"])
    newest = table.sequences(max_len=4).df.collect()
    assert len(newest) == rows["user"].nunique()
    with refused("column-missing", "'when'"):
        table.sequences(time="when")


TRAINED = {
    "sasrec": (SASRec, {"loss": "softmax"}),
    "esasrec": (SASRec, {"block": "ligr", "loss": "sampled_softmax"}),
    "hstu": (HSTU, {"loss": "gbce"}),
    "gru4rec": (GRU4Rec, {"loss": "bce"}),
    "bert4rec": (BERT4Rec, {"loss": "softmax"}),
}


@pytest.mark.parametrize("name", TRAINED)
def test_two_workers_equal_one(name):
    model_class, options = TRAINED[name]
    random = np.random.default_rng(0)
    length = random.integers(1, 7, 30)[:, None]
    history = random.integers(1, 20, (30, 7)) * (np.arange(7) <= length)
    columns = {"item_seq": history[:, :6] * (history[:, 1:] > 0), "next_seq": history[:, 1:]}
    columns["time_seq"] = np.sort(random.integers(1, 9**9, (30, 6)), 1)
    states = []
    for workers in (1, 2):
        torch.manual_seed(0)
        model = model_class(20, 6, 8, dropout=0.0, **options)
        est = Estimator.from_torch(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            backend="local",
            workers_per_node=workers,
        )
        inputs = [columns[each] for each in model.feature_cols]
        data = {"x": inputs if len(inputs) > 1 else inputs[0], "y": columns["next_seq"]}
        est.fit(data, epochs=3, batch_size=30, seed=1)
        states.append(est.get_model().state_dict())
    for key in states[0]:
        torch.testing.assert_close(states[1][key], states[0][key], rtol=0, atol=2e-6)


@pytest.mark.parametrize("embedding", ["sharded", "growing"])
def test_a_catalogue_over_two_workers_equals_one(embedding, tmp_path):
    random = np.random.default_rng(0)
    history = random.integers(1, 20, (24, 5))

    def model_of(config):
        torch.manual_seed(0)
        loss = SampledSoftmax(30)
        return SASRec(20, 4, 8, dropout=0.0, loss=loss, embedding=embedding)

    outputs = []
    for workers in (1, 2):
        est = Estimator.from_torch(
            model=model_of,
            optimizer=sgd,
            backend="local",
            workers_per_node=workers,
            model_dir=str(tmp_path / str(workers)),
        )
        data = {"x": history[:, :4], "y": history[:, 1:]}
        before = est.evaluate(data)["val_loss"]
        est.fit(data, epochs=3, batch_size=24, seed=1)
        assert est.evaluate(data)["val_loss"] != before
        outputs.append(est.predict({"x": history[:, :4]}))
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-5)
    with refused("unsupported", "SampledSoftmax"):
        ItemVectors(20, 8, embedding="growing").matrix()


def sgd(model, config):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def small(name: str = "gru4rec", **options) -> SequenceRecommender:
    options = {"dim": 16, "epochs": 25, "learning_rate": 0.02, "dropout": 0.1, **options}
    return SequenceRecommender(name, max_len=8, windows="all", batch_size=64, **options)


@pytest.fixture(scope="module")
def fitted():
    return small().fit(clicks())


def test_the_recommender_learns_what_follows_and_filters_what_was_seen(fitted):
    rows = clicks().sort_values(["user", "time", "item"])
    lists = fitted.recommend(k=3, filter_seen=False)
    last = rows.groupby("user")["item"].last()
    following = last.str[1:].astype(int).add(1).mod(20).map("i{:02}".format)
    best = lists[lists["rank"] == 1].set_index("user")["item"]
    assert (best == following).mean() > 0.4
    unseen = fitted.recommend(k=20)
    pairs = set(rows[["user", "item"]].itertuples(index=False, name=None))
    assert pairs.isdisjoint(unseen[["user", "item"]].itertuples(index=False, name=None))
    allowed = fitted.recommend([0, 99], k=5, filter_seen=False, items=["i03", "i04"])
    assert set(allowed["item"]) == {"i03", "i04"}
    similar = fitted.recommend_to_items(["i03"], k=4, items=["i03", "i04", "i05"])
    assert set(similar["item"]) == {"i04", "i05"}
    with refused("name-unknown", "'zz'"):
        fitted.recommend_to_items(["zz"])


def test_a_saved_recommender_gives_equal_lists(fitted, tmp_path):
    fitted.save(tmp_path / "model")
    loaded = small().load(tmp_path / "model")
    pd.testing.assert_frame_equal(loaded.recommend(k=5), fitted.recommend(k=5))
    with refused("model-mismatch", "weights"):
        small(dim=8).load(tmp_path / "model")
    with refused("argument-unknown", "GRU4Rec", "'dimm'"):
        SequenceRecommender("gru4rec", dimm=8)
    with refused("not-fitted"):
        small().save(tmp_path / "other")


def test_partial_fits_keep_vectors_and_add_items():
    rows = clicks()
    model = small(epochs=2).fit(rows[:400])
    vectors = model.network.items.matrix().detach().clone()
    new = pd.DataFrame({"user": [0, 0, 77], "item": ["i05", "a new one", "i06"], "time": 2e9})
    model.learning_rate = 1e-9
    model.fit_partial(pd.concat([rows[400:], new]))
    after = model.network.items.matrix().detach()
    assert after.shape == (vectors.shape[0] + 1, 16)
    torch.testing.assert_close(after[2:], vectors[1:], rtol=0, atol=1e-5)
    assert "a new one" in model.recommend([1], k=21, filter_seen=False)["item"].tolist()


def test_sequences_in_spark_train_the_same_model_as_rows_in_memory(table):
    options = {"dim": 8, "epochs": 2, "dropout": 0.0, "batch_size": 400}
    model = SequenceRecommender("hstu", max_len=8, windows="all", **options).fit(clicks())
    made = table.sequences(max_len=8, windows="all")
    of_spark = SequenceRecommender("hstu", backend="spark", **options).fit(made)
    lists, others = (each.recommend(k=5) for each in (model, of_spark))
    assert lists["user"].tolist() == others["user"].tolist()
    np.testing.assert_allclose(lists["score"], others["score"], atol=1e-4)


def test_an_estimator_evaluates_ranks_of_the_last_items(fitted):
    rows = clicks()
    model = fitted.network
    names = sorted(rows["item"].unique())
    history = np.zeros((25, 8), dtype=np.int64)
    following = np.zeros((25, 8), dtype=np.int64)
    expected = []
    for user, group in rows.sort_values(["time", "item"]).groupby("user"):
        ids = [names.index(item) + 1 for item in group["item"]][-6:]
        history[user, :5], following[user, :5] = ids[:-1], ids[1:]
        with torch.no_grad():
            scores = (model(torch.tensor(history[[user]])) @ model.items.matrix().T)[0]
        others = set(range(1, 21)) - set(ids)
        expected.append(1 + sum(float(scores[each] >= scores[ids[-1]]) for each in others))
    metrics = [NDCG(3), HitRate(3), MRR(3)]
    results = []
    for workers in (1, 2):
        est = Estimator.from_torch(
            model=model, metrics=metrics, backend="local", workers_per_node=workers
        )
        results.append(est.evaluate({"x": history, "y": following}, batch_size=7))
    assert results[0].keys() == results[1].keys()
    ranks = np.array(expected)
    hits = ranks <= 3
    for result in results:
        assert result["hit_rate@3"] == pytest.approx(hits.mean())
        assert result["ndcg@3"] == pytest.approx((hits / np.log2(1 + ranks)).mean())
        assert result["mrr@3"] == pytest.approx((hits / ranks).mean())


def test_models_and_baselines_are_compared_by_cross_validation(table):
    models = {"sequence": small(), "popular": Popular()}
    result = cross_validate(table, LastN(1), models, ["ndcg", "hit_rate"], 5, filter_seen=False)
    assert result.means.index.tolist() == ["sequence", "popular"]
    split = LastN(1).split(table)
    model = small().fit(split.train)
    metrics = model.evaluate(split.test, ["ndcg"], 5, filter_seen=False)
    assert metrics["ndcg@5"] > 0.2
