"""DIN on purchases or films: attention over the history for a candidate item.

    python examples/friesian/train_din.py --data-dir ml-100k --batch-size 1024 --epochs 2

=========================  =====================================================================
``--pooling weights``      each thing of the history has a separate weight, as in the paper
``--pooling softmax``      the same, and the weights of a history sum up to 1
``--pooling mean``         every thing counts the same: a model without attention, to compare
=========================  =====================================================================

Zhou et al., "Deep Interest Network for Click-Through Rate Prediction", KDD 2018.  Without a folder
the purchases are generated.  The last choice of every user is the test set.
"""

import films
import programs
import synthetic
import torch
from torch import nn

from bigdl.friesian.feature import FeatureTable
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.metrics import AUC
from bigdl.orca.learn.pytorch import Estimator

COLUMNS = ["item", "category", "item_hist_seq", "category_hist_seq", "item_hist_seq_mask"]


def prepare(options):
    """Return training and test rows of choices and random items, with histories."""
    if options.data_dir:
        choices, _, items = films.read(options.data_dir)
        items = items.select("item", "genre").rename({"genre": "category"})
    else:
        frames = synthetic.sessions(options.users, options.items)
        choices, items = map(FeatureTable.from_pandas, frames)
    choices, (_, index) = choices.select("user", "item", "time").category_encode(["user", "item"])
    items, _ = items.encode_string("item", index).dropna("item").category_encode("category")
    size = index.size() + 1

    table = choices.add_hist_seq("item", "user", max_len=options.steps).cache()
    table = table.add_negative_samples(size, seed=options.seed, exclude_history_col="item_hist_seq")
    table = table.add_value_features(["item", "item_hist_seq"], items, "item", "category")
    histories = ["item_hist_seq", "category_hist_seq"]
    table = table.pad(histories, options.steps, mask_cols="item_hist_seq")
    table = table.group_by("user", {"time": "max"}, join=True).cache()
    return table.filter("time < `max(time)`"), table.filter("time = `max(time)`")


class Dice(nn.Module):
    """Data-adaptive activation between 0 and the identity (Dice)."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width, affine=False)
        self.slope = nn.Parameter(torch.zeros(width))

    def forward(self, values):
        share = torch.sigmoid(self.norm(values))
        return values * (share + (1 - share) * self.slope)


class DIN(nn.Module):
    """Deep Interest Network: probability of a choice from the columns `COLUMNS`."""

    def __init__(self, items, categories, pooling="weights", dim=16):
        super().__init__()
        self.pooling = pooling
        self.items = nn.Embedding(items, dim)
        self.categories = nn.Embedding(categories, dim)
        for table in (self.items, self.categories):
            nn.init.normal_(table.weight, std=0.05)
        width = 2 * dim
        self.compare = nn.Sequential(nn.Linear(4 * width, 32), nn.PReLU(), nn.Linear(32, 1))
        self.network = nn.Sequential(
            *(nn.Linear(3 * width, 64), Dice(64)), *(nn.Linear(64, 32), Dice(32)), nn.Linear(32, 1)
        )

    def forward(self, item, category, items, categories, mask):
        target = self.vectors(item, category)
        history = self.vectors(items, categories)
        interest = (self.weights(target, history, mask).unsqueeze(-1) * history).sum(1)
        parts = [target, interest, target * interest]
        return torch.sigmoid(self.network(torch.cat(parts, 1))).squeeze(1)

    def vectors(self, item, category):
        return torch.cat([self.items(item.long()), self.categories(category.long())], -1)

    def weights(self, target, history, mask):
        """Return the attention weights of the history for the targets, 0 for padding."""
        there = mask.to(history.dtype)
        if self.pooling == "mean":
            return there / there.sum(1, keepdim=True)
        target = target.unsqueeze(1).expand_as(history)
        pairs = [target, history, target - history, target * history]
        weights = self.compare(torch.cat(pairs, -1)).squeeze(-1)
        if self.pooling == "weights":
            return weights * there
        return weights.masked_fill(there == 0, -1e9).softmax(1)


def main(argv=None):
    size = {"users": 1000, "items": 200, "steps": 20}
    choices = {"pooling": ["weights", "softmax", "mean"]}
    options = programs.parse(
        argv, __doc__, size=size, epochs=5, lr=0.005, data="MovieLens 100K", choices=choices
    )
    programs.start(options)
    train, test = prepare(options)

    schema = train.feature_schema().union(test.feature_schema())
    sizes = [
        max(schema.cardinality(name), schema.cardinality(f"{name}_hist_seq"))
        for name in ("item", "category")
    ]
    model = DIN(*sizes, pooling=options.pooling)
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.lr),
        loss=torch.nn.BCELoss(),
        metrics=[AUC()],
        workers_per_node=options.workers,
    )
    fit = {"batch_size": options.batch_size, "feature_cols": COLUMNS, "label_cols": "label"}
    est.fit(train.df, epochs=options.epochs, seed=options.seed, **fit)
    metrics = est.evaluate(test.df, **fit)

    # popularity, which does not depend on the user
    _, counts = train.filter("label = 1").count_encode("item")
    counted = test.count_encode("item", counts=counts)[0].to_pandas()
    often = float(synthetic.auc(counted["label"], counted["item_count"]))
    return programs.report({"auc": float(metrics["AUC"]), "auc of popularity": often})


if __name__ == "__main__":
    main()
    stop_orca_context()
