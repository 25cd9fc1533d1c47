"""MMoE: likes and retweets, two tasks in one model.

python examples/friesian/train_mmoe.py
"""

import engagements
import programs
import torch

from bigdl.friesian.models import MMoE, MultiTaskLoss
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.pytorch import Estimator


def main(argv=None):
    size = {"rows": 20000}
    options = programs.parse(argv, __doc__, size=size, epochs=5, lr=0.003)
    programs.start(options)
    train, test, chance = engagements.prepare(options)

    tasks = [f"{label}_probability" for label in engagements.LABELS]
    model = MMoE.from_schema(
        train.feature_schema(), engagements.CATEGORIES, engagements.NUMBERS, tasks, dim=8
    )
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.05),
        loss=MultiTaskLoss(),
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": model.feature_cols, "batch_size": options.batch_size}
    est.fit(
        train.df, epochs=options.epochs, label_cols=engagements.LABELS, seed=options.seed, **columns
    )

    # every task has a separate column
    predicted = est.predict(test.df, **columns)
    return programs.report(engagements.metrics_of(predicted, tasks, chance))


if __name__ == "__main__":
    main()
    stop_orca_context()
