"""Tests of the item index: exact search, filters, concurrent changes, saving and loading."""

import threading

import numpy as np
import pandas as pd
import pytest
import torch
from refusals import refused

from bigdl.friesian.serving import ItemIndex

RNG = np.random.default_rng(3)
IDS = 7 * RNG.permutation(1500)
VECTORS = RNG.standard_normal((1500, 12)).astype(np.float32)
QUERIES = RNG.standard_normal((50, 12)).astype(np.float32)


def exact(ids, vectors, query, metric, k, exclude=()):
    """Return the best items by comparing all vectors."""
    vectors, query = vectors.astype(np.float64), query.astype(np.float64)
    if metric == "cosine":
        vectors = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    scores = -((vectors - query) ** 2).sum(1) if metric == "l2" else vectors @ query
    stays = ~np.isin(ids, exclude)
    order = np.lexsort((ids[stays], -scores[stays]))[:k]
    return ids[stays][order].tolist()


@pytest.mark.parametrize("metric", ["inner_product", "cosine", "l2"])
def test_a_flat_index_is_exact_alone_and_among_others(metric):
    index = ItemIndex(IDS, VECTORS, metric=metric)
    found = index.search(QUERIES, 20).split()
    for query, (ids, scores) in zip(QUERIES, found, strict=True):
        assert ids.tolist() == exact(IDS, VECTORS, query, metric, 20)
        alone = index.search(query[None], 20)
        assert alone.ids.tolist() == ids.tolist()
        assert alone.scores.tolist() == scores.tolist()
        assert (np.diff(scores) <= 0).all()


@pytest.mark.parametrize(("kind", "options"), [("ivf", {"nprobe": 60}), ("hnsw", {})])
@pytest.mark.parametrize("metric", ["inner_product", "cosine", "l2"])
def test_the_other_kinds_find_nearly_all(kind, options, metric):
    index = ItemIndex(IDS, VECTORS, kind, metric, **options)
    found = index.search(QUERIES, 20).split()
    wanted = [exact(IDS, VECTORS, query, metric, 20) for query in QUERIES]
    shares = [
        len({*ids.tolist()} & {*best}) / 20 for (ids, _), best in zip(found, wanted, strict=True)
    ]
    assert np.mean(shares) > 0.85


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_seen_items_are_left_out_and_others_take_their_place(kind):
    options = {"nprobe": 10_000} if kind == "ivf" else {}
    index = ItemIndex(IDS, VECTORS, kind, **options)
    seen = [RNG.choice(IDS, count, False) for count in RNG.integers(0, 400, len(QUERIES))]
    seen[0] = np.array(exact(IDS, VECTORS, QUERIES[0], "inner_product", 300))
    for (ids, _), query, own in zip(
        index.search(QUERIES, 15, exclude=seen).split(), QUERIES, seen, strict=True
    ):
        assert len(ids) == 15
        assert not np.isin(ids, own).any()
        if kind == "flat":
            assert ids.tolist() == exact(IDS, VECTORS, query, "inner_product", 15, own)


def test_only_allowed_items_are_candidates():
    index = ItemIndex(IDS, VECTORS)
    allowed = [*RNG.choice(IDS, 40, False), 1, 2]
    refused = np.setdiff1d(IDS, allowed)
    for (ids, _), query in zip(
        index.search(QUERIES, 60, allowed=allowed).split(), QUERIES, strict=True
    ):
        assert ids.tolist() == exact(IDS, VECTORS, query, "inner_product", 60, refused)
    assert not len(index.search(QUERIES[:1], 5, allowed=[]).ids)


@pytest.mark.parametrize("kind", ["flat", "ivf", "hnsw"])
def test_items_are_added_replaced_and_removed(kind):
    index = ItemIndex(IDS, VECTORS, kind)
    best = 100 * QUERIES[0]
    index.add_item(5, best)
    index.add_item(int(IDS[0]), 2 * best)
    assert index.search(QUERIES[:1], 2).ids.tolist() == [IDS[0], 5]
    assert (len(index), 5 in index, 6 in index) == (1501, True, False)
    index.rebuild().result(30)
    assert index.search(QUERIES[:1], 2).ids.tolist() == [IDS[0], 5]
    index.remove_items([5, IDS[0], 6])
    assert len(index) == 1499
    assert not np.isin(index.search(QUERIES[:1], 50).ids, [5, IDS[0]]).any()


def test_items_are_added_while_the_index_is_searched_and_rebuilt():
    index = ItemIndex(IDS, VECTORS, rebuild_after=50)
    errors, ended = [], threading.Event()
    wanted = exact(IDS, VECTORS, QUERIES[0], "inner_product", 10)

    def search():
        while not ended.is_set():
            try:
                ids = index.search(QUERIES[:2], 10).ids[:10]
                assert [each for each in ids if each % 7 == 0] == wanted[: sum(ids % 7 == 0)]
            except Exception as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=search) for _ in range(3)]
    for each in threads:
        each.start()
    for number in range(200):
        index.add_item(7 * number + 1, QUERIES[0] * (1 if number % 2 else -1))
    index.rebuild().result(60)
    index.rebuild().result(60)
    ended.set()
    for each in threads:
        each.join()
    assert errors == []
    assert len(index) == 1700
    assert len(index._state.added_ids) == 0
    assert index.search(QUERIES[:1], 1700).counts.tolist() == [1700]


def test_an_index_is_saved_with_what_was_added_and_loaded(tmp_path):
    for kind in ("flat", "ivf", "hnsw"):
        index = ItemIndex(IDS, VECTORS, kind, "cosine")
        index.add_item(5, QUERIES[0])
        index.save(tmp_path / "index")
        loaded = ItemIndex.load(tmp_path / "index")
        assert (loaded.kind, loaded.metric, len(loaded)) == (kind, "cosine", 1501)
        assert loaded.search(QUERIES[:1], 1).ids.tolist() == [5]
        assert len(list((tmp_path / "index").iterdir())) == 2


def test_a_damaged_index_is_refused(tmp_path):
    ItemIndex(IDS, VECTORS).save(tmp_path / "index")
    (file,) = (tmp_path / "index").glob("files-*/base.faiss")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with refused("file-damaged", "base.faiss"):
        ItemIndex.load(tmp_path / "index")
    with refused("path-missing"):
        ItemIndex.load(tmp_path)
    (tmp_path / "other").write_text("x")
    with refused("path-exists"):
        ItemIndex(IDS, VECTORS).save(tmp_path)


def test_another_index_takes_its_place_while_it_is_searched():
    index = ItemIndex(IDS, VECTORS)
    index.swap(ItemIndex([1, 2], VECTORS[:2], "flat", "l2"))
    assert (len(index), index.metric) == (2, "l2")
    with refused("data-shape", "3", "12"):
        index.swap(ItemIndex([1], [[1, 2, 3]]))


def test_a_table_becomes_an_index(tmp_path):
    frame = pd.DataFrame({"item": IDS, "prediction": list(VECTORS)})
    frame.to_parquet(tmp_path / "vectors.parquet")
    index = ItemIndex.from_table(str(tmp_path / "vectors.parquet"))
    assert index.search(QUERIES[:1], 5).ids.tolist() == exact(
        IDS, VECTORS, QUERIES[0], "inner_product", 5
    )
    with refused("column-missing", "'vector'"):
        ItemIndex.from_table(frame, vector_col="vector")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ItemIndex([1, 1], VECTORS[:2]), ("data-order",)),
        (lambda: ItemIndex([1], VECTORS[:2]), ("data-shape", "1", "2")),
        (lambda: ItemIndex([1], [[np.nan]]), ("data-value",)),
        (lambda: ItemIndex([1], [1.0]), ("data-shape",)),
        (lambda: ItemIndex([1], [["x"]]), ("data-shape",)),
        (lambda: ItemIndex([1], VECTORS[:1], "tree"), ("argument-value",)),
        (lambda: ItemIndex([1], VECTORS[:1], "flat", nlist=3), ("argument-unknown", "'nlist'")),
        (lambda: ItemIndex([1], VECTORS[:1]).search(QUERIES[:, :3], 1), ("data-shape", "12")),
        (lambda: ItemIndex([1], VECTORS[:1]).search(QUERIES, 0), ("argument-value",)),
        (
            lambda: ItemIndex([1], VECTORS[:1]).search(QUERIES, 1, exclude=[[1]]),
            ("data-shape", "1", "50"),
        ),
    ],
)
def test_what_is_no_index_or_query_is_told(make, message):
    with refused(*message):
        make()


def test_faiss_and_torch_compute_in_one_process_at_the_same_time():
    """Test a search next to a model: Faiss and PyTorch both load OpenMP."""
    index = ItemIndex(IDS, VECTORS, threads=2)
    model, rows, ended = torch.nn.Linear(512, 512), torch.rand(512, 512), threading.Event()

    def compute():
        while not ended.is_set():
            with torch.inference_mode():
                model(rows)

    worker = threading.Thread(target=compute)
    worker.start()
    try:
        for _ in range(20):
            ids = index.search(QUERIES, 10).split()[7][0]
            assert ids.tolist() == exact(IDS, VECTORS, QUERIES[7], "inner_product", 10)
    finally:
        ended.set()
        worker.join()
