"""NCF on MovieLens, from its raw file to HR@10: of each user the last film among 99 others.

    python examples/friesian/train_ncf.py --data-dir ml-100k --batch-size 1024 --lr 0.002

Without a folder the ratings are generated.
"""

import programs
import synthetic
import torch

from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.models import NCF
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.pytorch import Estimator


def main(argv=None):
    size = {"users": 300, "items": 200}
    options = programs.parse(argv, __doc__, size=size, epochs=10, data="MovieLens' u.data")
    programs.start(options)
    chance = None
    if options.data_dir:
        names = ["user", "item", "rating", "time"]
        table = FeatureTable.read_csv(f"{options.data_dir}/u.data", "\t", names=names, dtype="int")
    else:
        ratings, _, _, chance = synthetic.movielens(options.users, options.items)
        table = FeatureTable.from_pandas(ratings)

    seen = table.group_by("user", {"item": "collect_set"}).rename({"collect_set(item)": "seen"})
    table = table.select("user", "item", "time").join(seen, on="user").cache()
    last = table.drop_duplicates("user", sort_cols=["time", "item"], keep="max").cache()
    train = table.join(last.select("user", "item"), on=["user", "item"], how="left_anti").cache()
    schema = table.feature_schema(["user", "item"])
    draw = {"item_size": schema.cardinality("item"), "exclude_history_col": "seen"}
    train = train.add_negative_samples(neg_num=4, seed=options.seed, **draw)
    test = last.add_negative_samples(neg_num=99, seed=options.seed + 1, **draw)

    model = NCF.from_schema(schema)
    est = Estimator.from_torch(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=options.lr),
        loss=torch.nn.BCELoss(),
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": model.feature_cols, "batch_size": options.batch_size}
    est.fit(train.df, epochs=options.epochs, label_cols="label", seed=options.seed, **columns)
    found = est.predict(test.df, **columns).select("user", "item", "label", "prediction").toPandas()
    figures = {"hr@10": synthetic.hit_rate(found["user"], found["label"], found["prediction"])}
    if chance is not None:
        ideal = chance[found["user"], found["item"]]
        figures["ideal hr@10"] = synthetic.hit_rate(found["user"], found["label"], ideal)
    return programs.report(figures)


if __name__ == "__main__":
    main()
    stop_orca_context()
