"""DeepFM on engagements like those of the RecSys Challenge 2021.

python examples/friesian/train_deepfm.py
"""

import engagements
import programs
import synthetic
import torch

from bigdl.friesian.models import DeepFM
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.metrics import AUC
from bigdl.orca.learn.pytorch import Estimator


def main(argv=None):
    size = {"rows": 20000}
    options = programs.parse(argv, __doc__, size=size, epochs=5, lr=0.003)
    programs.start(options)
    train, test, chance = engagements.prepare(options)

    model = DeepFM.from_schema(
        train.feature_schema(), engagements.CATEGORIES, engagements.NUMBERS, dim=8, hidden=(64, 32)
    )
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05),
        loss=torch.nn.BCELoss(),
        metrics=[AUC()],
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": model.feature_cols, "batch_size": options.batch_size}
    est.fit(train.df, epochs=options.epochs, label_cols="like", seed=options.seed, **columns)
    metrics = est.evaluate(test.df, label_cols="like", **columns)
    ideal = synthetic.auc(test.to_list("like"), chance[test.to_list("id"), 0])
    best = programs.share_of_best(est.predict(test.df, **columns), "like")
    results = {"auc": float(metrics["AUC"]), "ideal auc": float(ideal)}
    return programs.report({**results, "likes in the best tenth": best})


if __name__ == "__main__":
    main()
    stop_orca_context()
