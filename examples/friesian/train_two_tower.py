"""Two-tower model on MovieLens: films are ranked by the product of user and film vectors.

    python examples/friesian/train_two_tower.py --data-dir ml-100k --batch-size 1024 --lr 0.002

The model is trained on positive rows only: the other films of a batch are the negatives.  The
towers are separate models, so each predicts its table; the vectors can be stored in a vector index.
"""

import films
import programs
import torch

from bigdl.friesian.models import InBatchSoftmax, TwoTower
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.pytorch import Estimator

TEMPERATURE = 0.15


def main(argv=None):
    size = {"users": 300, "items": 200}
    options = programs.parse(argv, __doc__, size=size, epochs=10, lr=0.005, data="MovieLens 100K")
    programs.start(options)
    train, test, users, items, schema, counts, chance = films.towers(options)
    model = TwoTower.from_schema(schema, films.USER, films.ITEM, dim=32, hidden=(64,))
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.lr),
        loss=InBatchSoftmax(TEMPERATURE, counts),
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": model.feature_cols, "label_cols": "item"}
    est.fit(train.df, options.epochs, batch_size=options.batch_size, seed=options.seed, **columns)

    towers = est.get_model()
    vectors = (vectors_of(towers.user, users), vectors_of(towers.item, items))
    scored = films.scored(test, *vectors, counts, TEMPERATURE)
    return programs.report(films.hit_rates(scored, chance))


def vectors_of(tower, table):
    """Return the vectors of a tower for a table, as a matrix indexed by id."""
    predicted = Estimator.from_torch(model=tower).predict(
        table.df, feature_cols=tower.feature_cols, batch_size=1024
    )
    return films.as_matrix(predicted, tower.feature_cols[0])


if __name__ == "__main__":
    main()
    stop_orca_context()
