"""Features for trees: target encodings and counts of categories, without leakage.

    python examples/friesian/tree_features.py --output features

Write the Parquet files ``train`` and ``test``, for XGBoost, LightGBM and others, and train XGBoost
on them if it is installed.
"""

import importlib.util
import os
import tempfile

import programs
import synthetic

from bigdl.friesian.feature import FeatureTable
from bigdl.orca import stop_orca_context

CODED = ["engaging_user", "author", "language", "media", ["engaging_user", "author"]]


def prepare(options):
    frame, _ = synthetic.recsys(options.rows, seed=options.seed)
    frame.insert(0, "id", range(len(frame)))
    table = FeatureTable.from_pandas(frame).repartition(options.cores).fillna("none", "media")
    begin = options.rows * 6 // 7
    train, test = (table.filter(f"id {side} {begin}").cache() for side in ("<", ">="))
    # encodings use only earlier rows, also in the training rows
    train, codes = train.target_encode_by_time(CODED, "like", "timestamp", folds=20, smooth=10)
    train, counts = train.count_encode(CODED)
    test, _ = test.encode_target(codes, drop_cat=False).count_encode(CODED, counts=counts)
    texts = ["engaging_user", "author", "language", "media", "hashtags", "timestamp", "retweet"]
    return train.drop(*texts), test.drop(*texts)


def main(argv=None):
    size = {"rows": 20000}
    options = programs.parse(argv, __doc__, size=size, epochs=60, lr=0.1, output=True)
    programs.start(options)
    train, test = prepare(options)
    with tempfile.TemporaryDirectory() as folder:
        folder = options.output or folder
        train.write_parquet(os.path.join(folder, "train"))
        test.write_parquet(os.path.join(folder, "test"))
        written = FeatureTable.read_parquet(os.path.join(folder, "test"))
        frame = written.to_pandas()
        metrics = {
            "features": frame.shape[1] - 2,
            "auc of one code": float(
                synthetic.auc(frame["like"], frame["engaging_user_author_te_like"])
            ),
        }
        if importlib.util.find_spec("xgboost") is not None:
            metrics["auc"] = xgboost_auc(folder, options)
    return programs.report(metrics)


def xgboost_auc(folder, options):
    import pandas as pd
    from xgboost import XGBClassifier

    train, test = (pd.read_parquet(os.path.join(folder, part)) for part in ("train", "test"))
    inputs = [name for name in train.columns if name not in ("id", "like")]
    trees = XGBClassifier(
        n_estimators=options.epochs, learning_rate=options.lr, max_depth=5, tree_method="hist"
    )
    trees.fit(train[inputs], train["like"])
    return float(synthetic.auc(test["like"], trees.predict_proba(test[inputs])[:, 1]))


if __name__ == "__main__":
    main()
    stop_orca_context()
