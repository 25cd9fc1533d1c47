"""Film ratings, prepared for the recommender programs."""

import numpy as np
import pandas as pd
import synthetic
from pyspark.sql import Window
from pyspark.sql import functions as F

from bigdl.friesian.feature import FeatureTable

USER, ITEM = ["user", "occupation", "age_bin"], ["item", "genre"]


def pairs(options):
    """Return positive and negative rows for models of user and item ids.

    Returns
    -------
    train, test : FeatureTable
        ``user``, ``item``, ``label``; of each user the test has the last film among 99 others.
    schema : FeatureSchema
    chance : ndarray or None
        Of generated ratings, how likely a user chooses an item.
    """
    chance = None
    if options.data_dir:
        names = ["user", "item", "rating", "time"]
        table = FeatureTable.read_csv(f"{options.data_dir}/u.data", "\t", names=names, dtype="int")
    else:
        ratings, _, _, chance = synthetic.movielens(options.users, options.items)
        table = FeatureTable.from_pandas(ratings)
    seen, train, last = split(table)
    schema = seen.feature_schema(["user", "item"])
    draw = {"item_size": schema.cardinality("item"), "exclude_history_col": "seen"}
    train = train.add_negative_samples(neg_num=4, seed=options.seed, **draw)
    test = last.add_negative_samples(neg_num=99, seed=options.seed + 1, **draw)
    return train, test, schema, chance


def towers(options):
    """Return positive rows for two-tower models with user and item features.

    Returns
    -------
    train, test : FeatureTable
        `train` has the columns `USER` and `ITEM`; `test` has ``user``, ``item``, ``label``, of
        each user the last film among 99 others.
    users, items : FeatureTable
        The columns `USER`, and `ITEM`.
    schema : FeatureSchema
        Of both.
    counts : ndarray
        How often `train` has each film.
    chance : ndarray or None
        See :func:`pairs`.
    """
    ratings, users, items, chance = _tables(options, synthetic.movielens)
    _, train, last = split(ratings)
    train = train.join(users, on="user").join(items, on="item").cache()
    schema = users.feature_schema().union(items.feature_schema())
    size = schema.cardinality("item")
    counts = np.bincount(train.to_list("item"), minlength=size)
    draw = {"seed": options.seed, "exclude_history_col": "seen"}
    test = last.add_negative_samples(size, neg_num=99, **draw)
    return train, test, users, items, schema, counts, chance


def facts(options):
    """Return unencoded ratings, users and items."""
    ratings, users, items, _ = _raw(options, synthetic.movielens)
    return ratings, users.select("user", "age", "occupation"), items.select("item", "genre")


def _raw(options, generate):
    """Return ratings, users and items from files, or generated ones with their parameters."""
    if options.data_dir:
        return *read(options.data_dir), None
    *frames, known = generate(options.users, options.items)
    return *map(FeatureTable.from_pandas, frames), known


def _tables(options, generate):
    """Return the tables of :func:`_raw` with all features as numbers."""
    ratings, users, items, known = _raw(options, generate)
    return ratings, *_numbered(users, items), known


def opinions(options):
    """Return all ratings with features, for models that predict ratings.

    Returns
    -------
    train, test : FeatureTable
        ``user``, ``item``, ``rating``, the rest of `USER` and `ITEM`; of each user the test has
        the last fifth.
    value : ndarray or None
        Of generated ratings, what they are without chance.
    """
    ratings, users, items, value = _tables(options, synthetic.opinions)
    of_user = Window.partitionBy("user").orderBy("time", "item")
    table = ratings.append_column("part", F.percent_rank().over(of_user))
    table = table.join(users, on="user").join(items, on="item").cache()
    return table.filter("part <= 0.8").cache(), table.filter("part > 0.8").cache(), value


def ndcgs(predicted, value, baseline):
    """Return NDCG@10 of predictions, of a baseline and of an ideal model.

    Parameters
    ----------
    predicted : pandas.DataFrame
        ``user``, ``item``, ``rating``, ``prediction``.
    value : ndarray or None
        See :func:`opinions`.
    baseline : str
        A column of scores.
    """
    of = predicted["user"], predicted["rating"]
    metrics = {"ndcg@10": synthetic.ndcg(*of, predicted["prediction"])}
    metrics["ndcg@10 of mean ratings"] = synthetic.ndcg(*of, predicted[baseline])
    if value is not None:
        metrics["ideal ndcg@10"] = synthetic.ndcg(*of, value[predicted["user"], predicted["item"]])
    return metrics


def read(data_dir):
    """Read ratings, user features and item features of MovieLens 100K."""
    table = FeatureTable.read_csv
    ratings = table(f"{data_dir}/u.data", "\t", names=["user", "item", "rating", "time"])
    names = ["user", "age", "gender", "occupation", "zip"]
    users = table(f"{data_dir}/u.user", "|", names=names)
    genres = [f"genre{i}" for i in range(19)]
    fields = ["item", "title", "date", "video", "url", *genres]
    items = table(f"{data_dir}/u.item", "|", names=fields)
    # the set of its genres is the genre of a film
    return ratings, users, items.append_column("genre", F.concat_ws("", *genres))


def _numbered(users, items):
    """Return user and item features with all values as numbers."""
    users = users.cut_bins("age", [18, 25, 35, 45, 50, 56], out_cols="age_bin")
    users = users.category_encode("occupation")[0].select(*USER).cache()
    items = items.category_encode("genre", freq_limit=2)[0].fillna(0, "genre").select(*ITEM)
    return users, items.cache()


def split(ratings):
    """Return all records with the seen films of their user, training records, and last records."""
    seen = ratings.group_by("user", {"item": "collect_set"}).rename({"collect_set(item)": "seen"})
    table = ratings.select("user", "item", "time").join(seen, on="user").cache()
    last = table.drop_duplicates("user", sort_cols=["time", "item"], keep="max").cache()
    train = table.join(last.select("user", "item"), on=["user", "item"], how="left_anti").cache()
    return table, train, last


def scored(test, user_vectors, item_vectors, counts, temperature):
    """Return pairs with the products of their vectors as ``prediction``.

    Parameters
    ----------
    test : FeatureTable
        As :func:`towers` makes it.
    user_vectors, item_vectors : ndarray of shape (numbers, dim)
    counts : ndarray
        What training took off for frequent films, which is a part of what is chosen.
    temperature : float
        Of the training.
    """
    test = test.to_pandas()
    score = (user_vectors[test["user"]] * item_vectors[test["item"]]).sum(1)
    popular = np.log(np.maximum(counts, 1))[test["item"]]
    return test.assign(prediction=score / temperature + popular)


def hit_rates(predicted, chance):
    """Return HR@10 of predictions and of an ideal model.

    Parameters
    ----------
    predicted : pyspark.sql.DataFrame or pandas.DataFrame
        ``user``, ``item``, ``label``, ``prediction``.
    chance : ndarray or None
    """
    if not isinstance(predicted, pd.DataFrame):
        predicted = predicted.select("user", "item", "label", "prediction").toPandas()
    # a model with a 2D output returns vectors of one number
    score = [getattr(each, "values", [each])[0] for each in predicted["prediction"]]
    metrics = {"hr@10": synthetic.hit_rate(predicted["user"], predicted["label"], score)}
    if chance is not None:
        ideal = chance[predicted["user"], predicted["item"]]
        metrics["ideal hr@10"] = synthetic.hit_rate(predicted["user"], predicted["label"], ideal)
    return metrics


def as_matrix(predicted, name):
    """Return predicted vectors as a matrix indexed by the ids of a column."""
    frame = predicted.select(name, "prediction").toPandas()
    vectors = np.stack([each.toArray() for each in frame["prediction"]])
    matrix = np.zeros((frame[name].max() + 1, vectors.shape[1]), np.float32)
    matrix[frame[name]] = vectors
    return matrix
