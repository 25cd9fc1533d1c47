"""DIEN on purchases like the reviews of Amazon.

    python examples/friesian/train_dien.py

The history of each purchase is the previous purchases of the user; the last purchase of every user
is the test set.
"""

import programs
import synthetic
import torch

from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.models import DIEN, InterestLoss
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.metrics import AUC
from bigdl.orca.learn.pytorch import Estimator

HISTORIES = ["item_hist_seq", "category_hist_seq"]
NEGATIVES = ["neg_item_hist_seq", "neg_category_hist_seq"]


def prepare(reviews, meta, steps, seed):
    """Return training and test rows of purchases and random items, with histories."""
    reviews, index = reviews.category_encode(["user", "item"])
    item_index = index[1]
    meta, _ = meta.encode_string("item", item_index).dropna("item").category_encode("category")
    size = item_index.size() + 1

    table = reviews.add_hist_seq("item", "user", max_len=steps).cache()
    table = table.add_neg_hist_seq(size, "item_hist_seq", neg_num=1, seed=seed)
    table = table.add_negative_samples(size, seed=seed, exclude_history_col="item_hist_seq")
    items = ["item", "item_hist_seq", "neg_item_hist_seq"]
    table = table.add_value_features(items, meta, "item", "category")
    table = table.pad(HISTORIES, steps, mask_cols="item_hist_seq").pad(NEGATIVES, steps, row_len=1)
    table = table.group_by("user", {"time": "max"}, join=True).cache()
    return table.filter("time < `max(time)`"), table.filter("time = `max(time)`")


def main(argv=None):
    size = {"users": 1000, "items": 200, "steps": 10}
    options = programs.parse(argv, __doc__, size=size, epochs=5, lr=0.005)
    programs.start(options)
    frames = synthetic.sessions(options.users, options.items)
    train, test = prepare(*map(FeatureTable.from_pandas, frames), options.steps, options.seed)

    model = DIEN.from_schema(
        train.feature_schema().union(test.feature_schema()),
        targets=["item", "category"],
        histories=HISTORIES,
        mask="item_hist_seq_mask",
        negatives=NEGATIVES,
        dim=8,
        hidden=(32, 16),
    )
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.lr),
        loss=InterestLoss(0.5),
        metrics=[AUC()],
        workers_per_node=options.workers,
    )
    fit = {"batch_size": options.batch_size, "label_cols": "label"}
    est.fit(train.df, options.epochs, feature_cols=model.feature_cols, seed=options.seed, **fit)
    metrics = est.evaluate(test.df, feature_cols=model.predict_cols, **fit)
    predicted = est.predict(test.df, feature_cols=model.predict_cols)
    best = programs.share_of_best(predicted, "label")
    return programs.report({"auc": float(metrics["AUC"]), "purchases in the best tenth": best})


if __name__ == "__main__":
    main()
    stop_orca_context()
