"""Tests of ranking metrics against RecTools, RePlay and trec_eval on random lists.

The libraries run in separate environments. ``make test-recommenders`` creates them, and
``BIGDL_RECOMMENDERS`` names them.
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bigdl.friesian.metrics import ranking_metrics

KS = [1, 3, 10]

RECTOOLS = """
import sys, json
import pandas as pd
from rectools import Columns
from rectools import metrics as m
tables = [pd.read_json(sys.argv[1] + f"/{name}.json") for name in ("reco", "truth", "train")]
reco, truth, train = (
    each.rename(columns={"user": Columns.User, "item": Columns.Item, "rank": Columns.Rank})
    for each in tables
)
catalogue = list(range(60))
result = {}
for k in json.loads(sys.argv[2]):
    metrics = {
        "precision": m.Precision(k), "r_precision": m.Precision(k, r_precision=True),
        "recall": m.Recall(k), "hit_rate": m.HitRate(k), "f1": m.F1Beta(k), "mrr": m.MRR(k),
        "map:relevant": m.MAP(k), "map:k": m.MAP(k, divide_by_k=True), "ndcg:k": m.NDCG(k),
        "ndcg:achievable": m.NDCG(k, divide_by_achievable=True),
        "partial_auc": m.PartialAUC(k), "pap": m.PAP(k), "novelty": m.MeanInvUserFreq(k),
        "popularity": m.AvgRecPopularity(k), "serendipity": m.Serendipity(k),
        "coverage": m.CatalogCoverage(k, normalize=True), "covered_users": m.CoveredUsers(k),
        "sufficient_recommendations": m.SufficientReco(k),
        "unrepeated_recommendations": m.UnrepeatedReco(k),
    }
    found = m.calc_metrics(metrics, reco, truth, train, catalogue)
    result.update({f"{name}@{k}": float(value) for name, value in found.items()})
print(json.dumps(result))
"""

REPLAY = """
import sys, json
import pandas as pd
import replay.metrics as m
reco, truth, train = (
    pd.read_json(sys.argv[1] + f"/{name}.json") for name in ("reco", "truth", "train")
)
for each in (reco, truth, train):
    each.rename(columns={"user": "query_id", "item": "item_id"}, inplace=True)
reco["rating"] = -reco["rank"].astype(float)
ks = json.loads(sys.argv[2])
names = {
    "HitRate": "hit_rate", "MAP": "map:min", "MRR": "mrr", "NDCG": "ndcg:achievable",
    "Precision": "precision", "Recall": "recall", "RocAuc": "auc", "Coverage": "coverage:train",
}
metrics = [getattr(m, name)(ks) for name in names]
found = m.OfflineMetrics(metrics)(reco, truth, train)
split = {tuple(key.split("@")): value for key, value in found.items()}
print(json.dumps({f"{names[name]}@{k}": value for (name, k), value in split.items()}))
"""

TREC = """
import sys, json
import pandas as pd, pytrec_eval
reco, truth = (pd.read_json(sys.argv[1] + f"/{name}.json") for name in ("reco", "graded"))
run, qrel = {}, {}
for user, item, rank in zip(reco["user"], reco["item"], reco["rank"]):
    run.setdefault(str(user), {})[f"{item:03}"] = -float(rank)
for user, item, grade in zip(truth["user"], truth["item"], truth["grade"]):
    qrel.setdefault(str(user), {})[f"{item:03}"] = int(grade)
ks = ",".join(map(str, json.loads(sys.argv[2])))
names = {"ndcg_cut": "ndcg", "map_cut": "map", "P": "precision", "recall": "recall"}
found = pytrec_eval.RelevanceEvaluator(qrel, {f"{name}.{ks}" for name in names}).evaluate(run)
table = pd.DataFrame(found).T
sums = table.sum() / len(qrel)
split = {tuple(name.rsplit("_", 1)): value for name, value in sums.items()}
print(json.dumps({f"{names[name]}@{k}": value for (name, k), value in split.items()}))
"""


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    """Generate random lists, truth, graded truth and training rows, and write them as JSON."""
    random, folder = np.random.default_rng(5), tmp_path_factory.mktemp("peers")
    users = np.repeat(np.arange(200), random.integers(1, 16, 200))
    reco = pd.DataFrame({"user": users})
    reco["rank"] = reco.groupby("user").cumcount() + 1
    order = np.argsort(random.random((200, 60)), axis=1)
    reco["item"] = order[users, reco["rank"] - 1]

    def some(first: int) -> pd.DataFrame:
        rows = {"user": random.integers(first, 220, 900), "item": random.integers(0, 60, 900)}
        return pd.DataFrame(rows).drop_duplicates(ignore_index=True)

    truth = some(20)
    graded = truth.assign(grade=random.integers(1, 4, len(truth)))
    made = {"reco": reco, "truth": truth, "graded": graded, "train": some(0)}
    for name, table in made.items():
        table.to_json(folder / f"{name}.json")
    return made, folder


def run(environment: str, program: str, folder: Path) -> dict[str, float]:
    place = os.environ.get("BIGDL_RECOMMENDERS")
    if not place:
        pytest.skip("the other libraries are not installed: make test-recommenders")
    command = [f"{place}/{environment}/bin/python", "-c", program, str(folder), json.dumps(KS)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def ours(tables: dict[str, pd.DataFrame], key: str, **options) -> float:
    """Compute our metric by the name that the other libraries use."""
    name, _, k = key.partition("@")
    name, _, choice = name.partition(":")
    if name in ("map", "ndcg") and choice:
        options["map_divisor" if name == "map" else "ndcg_ideal"] = choice
    if choice != "train" and name in ("coverage", "serendipity"):
        options["catalogue"] = range(60)
    options = {"train": tables["train"], "truth": tables["truth"], **options}
    return ranking_metrics(tables["reco"], metrics=name, k=int(k), **options)[f"{name}@{k}"]


@pytest.mark.parametrize(("environment", "program"), [("rectools", RECTOOLS), ("replay", REPLAY)])
def test_metrics_equal_those_of_other_libraries(tables, environment, program):
    expected = run(environment, program, tables[1])
    assert {key: ours(tables[0], key) for key in expected} == pytest.approx(expected, abs=1e-12)


def test_graded_metrics_equal_those_of_trec_eval(tables):
    expected = run("rectools", TREC, tables[1])
    options = {"truth": tables[0]["graded"], "relevance_col": "grade"}
    found = {key: ours(tables[0], key, **options) for key in expected}
    # trec_eval leaves out users without recommendations, who count here in both.
    assert found == pytest.approx(expected, abs=1e-12)
