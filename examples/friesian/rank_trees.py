"""Rank the films of each user with pairwise gradient-boosted trees.

    python examples/friesian/rank_trees.py --data-dir ml-100k --library xgboost

The features are means of ratings and counts: of the film, of the user, and of genres per user and
per occupation. The means of a training row exclude its rating. Without a folder the ratings are
generated; the test set is the last ratings of each user. ``--library`` is ``xgboost`` or
``lightgbm``, which must be installed.
"""

import films
import programs

from bigdl.orca import stop_orca_context

CODED = ["item", "user", "genre", ["user", "genre"], ["occupation", "genre"]]


def prepare(options):
    train, test, value = films.opinions(options)
    train, codes = train.target_encode(CODED, "rating", kfold=5, fold_seed=options.seed, smooth=5)
    train, counts = train.count_encode("item")
    test, _ = test.encode_target(codes, drop_cat=False).count_encode("item", counts=counts)
    return train.sort("user").to_pandas(), test.to_pandas(), value


def ranker(options):
    """Return a ranker of the selected library, with equivalent parameters."""
    parameters = {"n_estimators": options.epochs, "learning_rate": options.lr, "max_depth": 4}
    parameters |= {"n_jobs": options.cores, "random_state": options.seed}
    if options.library == "xgboost":
        from xgboost import XGBRanker

        pairs = {"lambdarank_pair_method": "mean", "lambdarank_num_pair_per_sample": 10}
        return XGBRanker(objective="rank:pairwise", **pairs, **parameters)
    from lightgbm import LGBMRanker

    return LGBMRanker(objective="lambdarank", verbose=-1, **parameters)


def main(argv=None):
    size, choices = {"users": 300, "items": 200}, {"library": ["xgboost", "lightgbm"]}
    data = "MovieLens 100K"
    options = programs.parse(
        argv, __doc__, size=size, epochs=100, lr=0.05, data=data, choices=choices
    )
    programs.start(options)
    trees = ranker(options)
    train, test, value = prepare(options)
    inputs = [name for name in train.columns if name.endswith(("_te_rating", "_count"))]
    groups = {"qid": train["user"]}
    if options.library == "lightgbm":  # the rows of a user are contiguous
        groups = {"group": train.groupby("user").size()}
    trees.fit(train[inputs], train["rating"], **groups)
    predicted = test.assign(prediction=trees.predict(test[inputs]))
    return programs.report(films.ndcgs(predicted, value, "item_te_rating"))


if __name__ == "__main__":
    main()
    stop_orca_context()
