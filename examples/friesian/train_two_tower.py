"""Two towers on MovieLens: vectors of users and films whose product ranks the films.

    python examples/friesian/train_two_tower.py --data-dir ml-100k --batch-size 1024 --lr 0.002

Trained on what users chose alone: the other films of a batch are the negatives.  The towers are
models of their own, so each predicts its own table; the vectors can go into a vector index.
"""

import numpy as np
import programs
import synthetic
import torch
from pyspark.sql import functions as F

from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.models import InBatchSoftmax, TwoTower
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.pytorch import Estimator

USER, ITEM = ["user", "occupation", "age_bin"], ["item", "genre"]


def read(data_dir):
    """Ratings, facts about users and about items, of MovieLens 100K."""
    table = FeatureTable.read_csv
    ratings = table(f"{data_dir}/u.data", "\t", names=["user", "item", "rating", "time"])
    names = ["user", "age", "gender", "occupation", "zip"]
    users = table(f"{data_dir}/u.user", "|", names=names)
    genres = [f"genre{i}" for i in range(19)]
    fields = ["item", "title", "date", "video", "url", *genres]
    items = table(f"{data_dir}/u.item", "|", names=fields)
    # the set of its genres is the genre of a film
    return ratings, users, items.append_column("genre", F.concat_ws("", *genres))


def main(argv=None):
    size = {"users": 300, "items": 200}
    options = programs.parse(argv, __doc__, size=size, epochs=10, lr=0.005, data="MovieLens 100K")
    programs.start(options)
    chance = None
    if options.data_dir:
        ratings, users, items = read(options.data_dir)
    else:
        *frames, chance = synthetic.movielens(options.users, options.items)
        ratings, users, items = map(FeatureTable.from_pandas, frames)
    users = users.cut_bins("age", [18, 25, 35, 45, 50, 56], out_cols="age_bin")
    users = users.category_encode("occupation")[0].select(*USER).cache()
    items = items.category_encode("genre", freq_limit=2)[0].fillna(0, "genre").select(*ITEM).cache()

    seen = ratings.group_by("user", {"item": "collect_set"}).rename({"collect_set(item)": "seen"})
    ratings = ratings.select("user", "item", "time").join(seen, on="user").cache()
    last = ratings.drop_duplicates("user", sort_cols=["time", "item"], keep="max").cache()
    train = ratings.join(last.select("user", "item"), on=["user", "item"], how="left_anti")
    train = train.join(users, on="user").join(items, on="item").cache()

    schema = users.feature_schema().union(items.feature_schema())
    model = TwoTower.from_schema(schema, USER, ITEM, dim=32, hidden=(64,))
    counts = np.bincount(train.to_list("item"), minlength=schema.cardinality("item"))
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.lr),
        loss=InBatchSoftmax(0.15, counts),
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": model.feature_cols, "label_cols": "item"}
    est.fit(train.df, options.epochs, batch_size=options.batch_size, seed=options.seed, **columns)

    towers = est.get_model()
    user_vectors, item_vectors = vectors(towers.user, users), vectors(towers.item, items)
    size = schema.cardinality("item")
    draw = {"seed": options.seed, "exclude_history_col": "seen"}
    test = last.add_negative_samples(size, neg_num=99, **draw).to_pandas()
    score = (user_vectors[test["user"]] * item_vectors[test["item"]]).sum(1)
    # what training took off is a part of what is chosen
    score = score / 0.15 + np.log(np.maximum(counts, 1))[test["item"]]
    figures = {"hr@10": synthetic.hit_rate(test["user"], test["label"], score)}
    if chance is not None:
        ideal = chance[test["user"], test["item"]]
        figures["ideal hr@10"] = synthetic.hit_rate(test["user"], test["label"], ideal)
    return programs.report(figures)


def vectors(tower, table):
    """The vectors that a tower makes of a table, as a matrix with a row for each number."""
    predicted = Estimator.from_torch(model=tower).predict(
        table.df, feature_cols=tower.feature_cols, batch_size=1024
    )
    found = predicted.select(tower.feature_cols[0], "prediction").toPandas()
    numbers = found.iloc[:, 0]
    matrix = np.zeros((numbers.max() + 1, len(found["prediction"].iloc[0])), np.float32)
    matrix[numbers] = np.stack([each.toArray() for each in found["prediction"]])
    return matrix


if __name__ == "__main__":
    main()
    stop_orca_context()
