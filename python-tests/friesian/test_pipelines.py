"""Tests of complete data preparations, as in the recommender examples."""

import numpy as np
import pandas as pd
import pytest

from bigdl.friesian.feature import FeatureTable, StringIndex


@pytest.fixture(scope="module")
def clicks():
    rng = np.random.default_rng(5)
    count = 400
    return pd.DataFrame(
        {
            "user": rng.choice([f"u{i}" for i in range(25)], count),
            "item": rng.choice([f"i{i}" for i in range(40)], count, p=np.r_[0.22, [0.02] * 39]),
            "category": rng.choice(["toys", "books", None], count),
            "price": np.where(rng.random(count) < 0.2, np.nan, rng.gamma(2, 10, count)),
            "time": rng.integers(0, 10**6, count),
            "label": rng.integers(0, 2, count),
        }
    )


@pytest.mark.slow
def test_wide_and_deep(orca_spark, clicks, tmp_path):
    """Test reading, filling, encoding, scaling, crossing and writing, also for new data."""
    path = str(tmp_path / "clicks.parquet")
    clicks.to_parquet(path)
    table = FeatureTable.read_parquet(path).cast("price", "double").fillna("none", "category")
    table = table.fill_median("price")
    names = ["user", "item", "category"]
    train, indices = table.category_encode(names, freq_limit=10, order_by_freq=True)
    train, extremes = train.fillna(0, names).min_max_scale("price")
    train = train.cross_columns([["user", "item"]], [50]).ordinal_shuffle_partition(seed=1)
    train.write_parquet(str(tmp_path / "train.parquet"))
    for index in indices:
        index.write_parquet(str(tmp_path))

    read = FeatureTable.read_parquet(str(tmp_path / "train.parquet"))
    assert read.columns == [*clicks.columns, "user_item"]
    assert read.size() == len(clicks)
    counts = clicks["item"].value_counts()
    assert indices[1].to_dict()["i0"] == 1
    assert max(read.to_list("item")) == (counts >= 10).sum()
    figures = read.get_stats(["price", "user_item"], ["min", "max"])
    assert figures["price"] == [0.0, 1.0]
    assert 0 <= figures["user_item"][0] <= figures["user_item"][1] < 50

    again = [StringIndex.read_parquet(str(tmp_path / f"{name}.parquet")) for name in names]
    test = table.encode_string(names, again).fillna(0, names)
    test = test.transform_min_max_scale("price", extremes)
    order = ["time", "user", "item", "category", "price"]
    same = test.select(*order).subtract(read.select(*order))
    assert same.size() == 0


def test_sessions_with_negatives(orca_spark, clicks):
    """Test histories with negatives, categories, padding and masks, as for DIEN."""
    table = FeatureTable.from_pandas(clicks).fillna("none", "category")
    indices = table.gen_string_idx(["user", "item", "category"], order_by_freq=True)
    table = table.encode_string(["user", "item", "category"], indices)
    items = indices[1].size()
    pairs = table.drop_duplicates("item", "time").select("item", "category")
    found = (
        table.select("user", "item", "time")
        .add_hist_seq("item", "user", "time", max_len=8, num_seqs=3)
        .add_neg_hist_seq(items + 1, "item_hist_seq", 4, seed=1)
        .add_negative_samples(items + 1, neg_num=2, seed=2, exclude_history_col="item_hist_seq")
        .add_value_features(
            ["item", "item_hist_seq", "neg_item_hist_seq"], pairs, "item", "category"
        )
        .pad(
            ["item_hist_seq", "category_hist_seq", "neg_item_hist_seq", "neg_category_hist_seq"],
            seq_len=8,
            mask_cols="item_hist_seq",
        )
    )
    rows = found.collect()
    assert len(rows) == 25 * 3 * 3
    category_of = dict(zip(pairs.to_list("item"), pairs.to_list("category"), strict=True))
    for row in rows:
        real = sum(row.item_hist_seq_mask)
        assert len(row.item_hist_seq) == len(row.neg_item_hist_seq) == 8
        assert row.item_hist_seq[real:] == [0] * (8 - real)
        assert row.category == category_of[row.item]
        assert [category_of[item] for item in row.item_hist_seq[:real]] == (
            row.category_hist_seq[:real]
        )
        for item, negatives in zip(row.item_hist_seq[:real], row.neg_item_hist_seq, strict=False):
            assert len(negatives) == 4
            assert item not in negatives
        if not row.label:
            assert row.item not in row.item_hist_seq[:real]


def test_small_tables_stay_in_few_partitions(orca_spark, clicks):
    before = orca_spark.conf.get("spark.sql.shuffle.partitions")
    orca_spark.conf.set("spark.sql.shuffle.partitions", "200")
    try:
        table = FeatureTable.from_pandas(clicks)
        for found in [
            table.add_hist_seq("item", "user", "time"),
            table.drop_duplicates(["user", "item"], "time"),
            table.group_by("user", {"price": "avg"}),
            table.filter_by_frequency("item", keep_rows=True),
        ]:
            assert found.df.rdd.getNumPartitions() <= 4
    finally:
        orca_spark.conf.set("spark.sql.shuffle.partitions", before)


@pytest.mark.slow
def test_targets_of_one_table_for_another(orca_spark, clicks):
    """Test target encoding that is learned on one part and applied to the other."""
    train, test = FeatureTable.from_pandas(clicks).random_split([0.7, 0.3], seed=3)
    names = ["user", "item", ["user", "category"]]
    encoded, codes = train.target_encode(names, "label", kfold=5, fold_seed=1)
    applied = test.encode_target(codes, drop_cat=False)
    added = ["user_te_label", "item_te_label", "user_category_te_label"]
    assert encoded.columns[-3:] == applied.columns[-3:] == added
    for values in applied.select(*added).to_dict().values():
        assert all(0 < value < 1 for value in values)
