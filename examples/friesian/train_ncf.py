"""NCF on MovieLens, from its raw file to HR@10 of the last film among 99 others.

    python examples/friesian/train_ncf.py --data-dir ml-100k --batch-size 1024 --lr 0.002

Without a folder the ratings are generated.
"""

import films
import programs
import torch

from bigdl.friesian.models import NCF
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.pytorch import Estimator


def main(argv=None):
    size = {"users": 300, "items": 200}
    options = programs.parse(argv, __doc__, size=size, epochs=10, data="MovieLens' u.data")
    programs.start(options)
    train, test, schema, chance = films.pairs(options)
    model = NCF.from_schema(schema)
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.lr),
        loss=torch.nn.BCELoss(),
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": model.feature_cols, "batch_size": options.batch_size}
    est.fit(train.df, epochs=options.epochs, label_cols="label", seed=options.seed, **columns)
    predicted = est.predict(test.df, **columns)
    return programs.report(films.hit_rates(predicted, chance))


if __name__ == "__main__":
    main()
    stop_orca_context()
