"""Wide & Deep on clicks like those of Criteo.

    python examples/friesian/train_wide_and_deep.py

Vocabularies, medians and extremes are fitted on the first days only; the last days are the test
set.
"""

import programs
import synthetic
import torch

from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.models import WideAndDeep
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.metrics import AUC
from bigdl.orca.learn.pytorch import Estimator


def prepare(train, test, numbers, categories):
    """Encode both tables, with encoders fitted on the training table."""
    indices = train.gen_string_idx(categories, freq_limit=3)
    crosses = [categories[:2]]
    extremes, ready = None, []
    for table in (train, test):
        table = table.cross_columns(crosses, [1000]).encode_string(categories, indices)
        table = table.fillna(0, [*categories, *numbers]).log(numbers)
        if extremes is None:
            table, extremes = table.min_max_scale(numbers)
        else:
            table = table.transform_min_max_scale(numbers, extremes, clip=True)
        ready.append(table.cache())
    return ready


def main(argv=None):
    size = {"rows": 20000, "numbers": 13, "categories": 26}
    options = programs.parse(argv, __doc__, size=size, epochs=5, lr=0.003)
    programs.start(options)
    frame, chance = synthetic.criteo(options.rows, options.numbers, options.categories)
    clicks = FeatureTable.from_pandas(frame).repartition(options.cores).cache()
    numbers = [f"I{i}" for i in range(1, options.numbers + 1)]
    categories = [f"C{i}" for i in range(1, options.categories + 1)]
    begin = options.rows * 4 // 5
    train, test = (clicks.filter(f"id {side} {begin}") for side in ("<", ">="))
    train, test = prepare(train, test, numbers, categories)

    wide = ["_".join(categories[:2]), *categories]
    model = WideAndDeep.from_schema(
        train.feature_schema(), wide, categories, numbers, dim=8, hidden=(64, 32), dropout=0.2
    )
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.lr),
        loss=torch.nn.BCELoss(),
        metrics=[AUC()],
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": model.feature_cols, "batch_size": options.batch_size}
    est.fit(train.df, epochs=options.epochs, label_cols="label", seed=options.seed, **columns)
    metrics = est.evaluate(test.df, label_cols="label", **columns)
    ideal = synthetic.auc(frame["label"][begin:], chance[begin:])
    best = programs.share_of_best(est.predict(test.df, **columns), "label")
    results = {"auc": float(metrics["AUC"]), "ideal auc": float(ideal)}
    return programs.report({**results, "clicks in the best tenth": best})


if __name__ == "__main__":
    main()
    stop_orca_context()
