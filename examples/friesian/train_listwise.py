"""Listwise ranking in Keras: each user's films are one list in the order of ratings.

    python examples/friesian/train_listwise.py --data-dir ml-100k

=======================  ========================================================================
``--lists sample``       of each user many lists of five films, drawn at random
``--lists pad``          of each user one list of all her films, padded to one length
=======================  ========================================================================

Without a folder the ratings are generated.  The test set is the last ratings of each user.
"""

import films
import programs

from bigdl.orca import stop_orca_context
from bigdl.orca.learn.tf2 import Estimator

LISTS = ["item", "mean", "rating"]


def prepare(options):
    """Return training lists and test ratings, with the mean ratings as `mean`.

    A row of lists has a user, and arrays of her films, their means and ratings.
    """
    train, test, value = films.opinions(options)
    # means of a training row exclude its rating
    mean = {"cat_cols": "item", "target_cols": "rating", "out_cols": "mean"}
    train, codes = train.target_encode(**mean, kfold=5, fold_seed=options.seed, smooth=5)
    test = test.encode_target(codes, drop_cat=False).cache()
    schema = train.concat(test).feature_schema(["user", "item"])

    lists = train.group_by("user", dict.fromkeys(LISTS, "collect_list"))
    lists = lists.rename({f"collect_list({name})": name for name in LISTS}).cache()
    if options.lists == "pad":
        lists = lists.pad(LISTS, seq_len=100)
    else:
        draw = {"num_sampled_list": 50, "num_sampled_item": 5, "random_seed": options.seed}
        lists = lists.sample_listwise(LISTS, **draw)
    return lists.cache(), test, schema, value


def ranker(users, items, dim=16):
    """Return a model that scores films of shape (n, films) for users of shape (n,).

    What all users think of a film is given; what a user thinks of it beyond that is learned.
    """
    import keras
    from keras import layers, ops

    user = keras.Input((), dtype="int64", name="user")
    item = keras.Input((None,), dtype="int64", name="item")
    mean = keras.Input((None,), dtype="float32", name="mean")
    small = {"embeddings_initializer": keras.initializers.RandomNormal(stddev=0.02)}
    taste = layers.Embedding(users, dim, name="taste", **small)(user)
    traits = layers.Embedding(items, dim, name="traits", **small)(item)
    quality = layers.Embedding(items, 1, name="quality", **small)(item)
    scores = mean + ops.squeeze(quality, -1) + ops.einsum("nd,nfd->nf", taste, traits)
    return keras.Model({"user": user, "item": item, "mean": mean}, scores)


def listwise_loss(rating, score):
    """Return the cross-entropy between the softmax of ratings and of scores within a list.

    Cao et al., "Learning to Rank: From Pairwise Approach to Listwise Approach", ICML 2007.  The
    rating 0 is padding.
    """
    from keras import ops

    rating = ops.cast(rating, score.dtype)
    padding = ops.where(rating > 0, 0.0, -1e9)
    wanted, log_shares = ops.softmax(rating + padding), ops.log_softmax(score + padding)
    return -ops.sum(wanted * log_shares, -1)


def main(argv=None):
    size, choices = {"users": 300, "items": 200}, {"lists": ["sample", "pad"]}
    data = "MovieLens 100K"
    options = programs.parse(argv, __doc__, size=size, epochs=5, data=data, choices=choices)
    programs.start(options)
    lists, test, schema, value = prepare(options)
    sizes = schema.cardinality("user"), schema.cardinality("item")

    def compile_args(config):
        import keras

        optimizer = keras.optimizers.AdamW(config["lr"], weight_decay=1.0)
        return {"optimizer": optimizer, "loss": listwise_loss}

    est = Estimator.from_keras(
        model_creator=lambda config: ranker(*sizes),
        compile_args_creator=compile_args,
        config={"lr": options.lr},
        workers_per_node=options.workers,
    )
    columns = {"feature_cols": ["user", "item", "mean"], "batch_size": options.batch_size}
    est.fit(lists.df, epochs=options.epochs, label_cols="rating", seed=options.seed, **columns)

    # predicts lists of one film
    for name in ("item", "mean"):
        test = test.merge_cols([name], name)
    predicted = est.predict(test.df, **columns).toPandas()
    for name in ("item", "mean", "prediction"):
        predicted[name] = [each[0] for each in predicted[name]]
    return programs.report(films.ndcgs(predicted, value, "mean"))


if __name__ == "__main__":
    main()
    stop_orca_context()
