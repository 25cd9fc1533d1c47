"""NCF in its three forms, on ratings of a few users."""

import neumf
import numpy as np
import pandas as pd
import pytest
import train_dataframe
import train_dataloader
import train_xshards

PROGRAMS = {
    "dataframe": train_dataframe.main,
    "xshards": train_xshards.main,
    "dataloader": train_dataloader.main,
}


@pytest.fixture(scope="module")
def ratings():
    """Of 30 users, some of whom have rated one item only, or all but one."""
    rng = np.random.default_rng(0)
    counts = [1, 2, 19, *rng.integers(3, 15, 27)]
    chosen = [
        (u, i, t) for u, n in enumerate(counts) for t, i in enumerate(rng.permutation(20)[:n])
    ]
    return pd.DataFrame(chosen, columns=["user", "item", "time"]).sample(frac=1, random_state=0)


def as_set(user, item, label):
    return sorted(zip(user.tolist(), item.tolist(), label.tolist(), strict=True))


def test_hashes_are_those_of_spark(orca_spark):
    numbers = [0, 1, -1, 42, 2**62, -(2**63)]
    frame = orca_spark.createDataFrame([(n, 7) for n in numbers], "a BIGINT, b BIGINT")
    expected = [row[0] for row in frame.selectExpr("xxhash64(a, b)").collect()]
    assert neumf.hashed(np.array(numbers), 7).tolist() == expected


@pytest.mark.slow
def test_the_spark_plan_draws_what_numpy_draws(orca_spark, ratings):
    frame = orca_spark.createDataFrame(ratings).repartition(3)
    per_user, users, items = neumf.histories(frame)
    assert (users, items) == (30, 20)
    histories = neumf.Histories(ratings, items)
    for made, expected in (
        (neumf.training_rows(per_user, 4, 5), histories.training_rows(4, 5)),
        (neumf.test_rows(per_user, 9, 5), histories.test_rows(9, 5)),
    ):
        found = made.toPandas()
        columns = (found[name].to_numpy() for name in ("user", "item", "label"))
        assert as_set(*columns) == as_set(*expected)


def test_negatives_are_items_that_the_user_has_not_rated(ratings):
    histories = neumf.Histories(ratings, 20)
    seen = set(zip(ratings["user"], ratings["item"], strict=True))
    last = ratings.sort_values("time").groupby("user").tail(1)
    held_out = set(zip(last["user"], last["item"], strict=True))
    user, item, label = histories.training_rows(4, 0)
    pairs = list(zip(user.tolist(), item.tolist(), strict=True))
    assert {p for p, x in zip(pairs, label, strict=True) if x} == seen - held_out
    assert not seen & {p for p, x in zip(pairs, label, strict=True) if not x}
    assert len(pairs) == 5 * (len(seen) - 30)
    user, item, label = histories.test_rows(1000, 0)
    pairs = list(zip(user.tolist(), item.tolist(), strict=True))
    assert {p for p, x in zip(pairs, label, strict=True) if x} == held_out
    every = {(u, i) for u in range(30) for i in range(20)}
    assert {p for p, x in zip(pairs, label, strict=True) if not x} == every - seen


def test_who_has_rated_everything_has_no_negatives(orca_spark):
    ratings = pd.DataFrame({"user": [0, 0, 1], "item": [0, 1, 0], "time": [1, 2, 3]})
    expected = neumf.Histories(ratings, 2).training_rows(2, 0)
    assert as_set(*expected) == [(0, 0, 1.0)]
    per_user, _, _ = neumf.histories(orca_spark.createDataFrame(ratings))
    assert [tuple(row) for row in neumf.training_rows(per_user, 2, 0).collect()] == [(0, 0, 1.0)]


def test_hits_are_the_held_out_items_among_the_best(orca_spark):
    label = np.array([1, 0, 0] * 2, np.float32)
    user = np.array([3] * 3 + [8] * 3, np.int32)
    score = np.array([0.5, 0.6, 0.1, 0.2, 0.4, 0.3], np.float32)
    assert neumf.hits(user, label, score, best=2).tolist() == [True, False]
    table = pd.DataFrame({"user": user, "label": label, "prediction": score})
    assert neumf.hit_rate(orca_spark.createDataFrame(table), best=2) == 0.5


@pytest.mark.slow
@pytest.mark.parametrize("form", PROGRAMS)
def test_the_program_learns_and_resumes(orca_spark, data_dir, tmp_path, form):
    argv = ["--data-dir", str(data_dir / "ml-100k"), "--users", "60", "--epochs", "3"]
    argv += ["--batch-size", "512", "--lr", "0.01", "--output", str(tmp_path)]
    found = PROGRAMS[form](argv)
    assert found["last_loss"] < 0.9 * found["first_loss"]
    assert found["auc"] > 0.6
    assert found["hr"] > 0.15  # 0.1 by chance
    assert (tmp_path / "ncf.ckpt").is_file()
    assert (tmp_path / "ncf.pt").is_file()
