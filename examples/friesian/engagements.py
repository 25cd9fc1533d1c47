"""Features of engagements, shared by the programs that predict likes and retweets."""

import synthetic

from bigdl.friesian.feature import FeatureTable

CATEGORIES = ["engaging_user", "author", "language", "media", "hashtag", "followers_bin", "hour"]
NUMBERS = ["author_count", "followers"]
LABELS = ["like", "retweet"]


def prepare(options):
    """Return training and test (last day) tables, and the true probabilities of all rows by id.

    What the second table is encoded with was learned from the first.
    """
    frame, chance = synthetic.recsys(options.rows, seed=options.seed)
    frame.insert(0, "id", range(len(frame)))
    table = FeatureTable.from_pandas(frame).repartition(options.cores)
    table = table.fillna("none", "media").append_column("followers_bin", table.followers)
    hour = (table.timestamp % 86400 / 3600).cast("int")
    # the first hashtag, of the most frequent ones
    table = table.append_column("hour", hour).rename({"hashtags": "hashtag"}).cache()
    begin = options.rows * 6 // 7
    train, test = (table.filter(f"id {side} {begin}") for side in ("<", ">="))

    names = ["engaging_user", "author", "language", "media"]
    indices = train.gen_string_idx(names, freq_limit=3)
    tags = train.gen_string_idx("hashtag", order_by_freq=True, do_split=True)
    _, counts = train.count_encode("author")
    edges = train.quantile_edges("followers_bin", 10)
    extremes, ready = None, []
    for part in (train, test):
        part, _ = part.count_encode("author", counts=counts)
        part = part.encode_string(names, indices).fillna(0, names)
        part = part.encode_string("hashtag", tags, do_split=True, keep_most_frequent=True)
        part = part.fillna(0, "hashtag").cut_bins("followers_bin", edges, out_cols="followers_bin")
        part = part.log(NUMBERS)
        if extremes is None:
            part, extremes = part.min_max_scale(NUMBERS)
        else:
            part = part.transform_min_max_scale(NUMBERS, extremes, clip=True)
        ready.append(part.cache())
    return *ready, chance


def metrics_of(predicted, tasks, chance):
    """Return the AUC of each task, and that of an ideal model.

    Parameters
    ----------
    predicted : pyspark.sql.DataFrame
    tasks : list of str
        Its columns of predictions, in the order of `LABELS`.
    chance : ndarray of shape (rows, 2)
    """
    frame = predicted.select("id", *LABELS, *tasks).toPandas()
    by_name = {}
    for i, (label, task) in enumerate(zip(LABELS, tasks, strict=True)):
        # a model with a 2D output returns vectors of one number
        score = [getattr(each, "values", [each])[0] for each in frame[task]]
        by_name[f"{label} auc"] = float(synthetic.auc(frame[label], score))
        by_name[f"ideal {label} auc"] = float(synthetic.auc(frame[label], chance[frame["id"], i]))
    return by_name
