"""Keras recommender models trained on feature tables.

    python examples/friesian/train_keras.py --model deepfm

=================  ==============================================================================
``deepfm``         clicks like those of Criteo; a pipeline learns vocabularies and extremes from
                   the first days only, the last ones are the test
``wide_and_deep``  the same, with a cross
``ncf``            MovieLens (``--data-dir``, or generated): of each user the last film among 99
``two_tower``      the same, by vectors of users and of films
``mmoe``           engagements like those of the RecSys Challenge 2021: likes and retweets
=================  ==============================================================================
"""

import argparse

import engagements
import films
import programs
import synthetic

from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.feature.pipeline import FeaturePipeline
from bigdl.friesian.models import keras as models
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.tf2 import Estimator

TEMPERATURE = 0.15


def clicks(argv, name):
    """Train DeepFM or Wide & Deep on clicks."""
    size = {"rows": 20000, "numbers": 13, "categories": 26}
    options = programs.parse(argv, __doc__, size=size, epochs=4, lr=0.003)
    programs.start(options)
    frame, chance = synthetic.criteo(options.rows, options.numbers, options.categories)
    table = FeatureTable.from_pandas(frame).repartition(options.cores).cache()
    numbers = [f"I{i}" for i in range(1, options.numbers + 1)]
    categories = [f"C{i}" for i in range(1, options.categories + 1)]
    begin = options.rows * 4 // 5
    fitted = pipeline(numbers, categories).fit(table.filter(f"id < {begin}"))
    train, test = (fitted.transform(table.filter(f"id {s} {begin}")) for s in ("<", ">="))
    schema, crosses = fitted.feature_schema(), ["_".join(categories[:2])]
    shape = {"dim": 8, "hidden": (64, 32), "dropout": 0.2}

    def model_creator(config):
        if name == "deepfm":
            return models.deepfm(schema, categories, numbers, **shape)
        return models.wide_and_deep(schema, crosses, categories, numbers, **shape)

    est = estimator(model_creator, "binary_crossentropy", options, metrics=["AUC"])
    features = [*(crosses if name == "wide_and_deep" else []), *categories, *numbers]
    columns = {"feature_cols": features, "batch_size": options.batch_size}
    est.fit(train.df, epochs=options.epochs, label_cols=["label"], seed=options.seed, **columns)
    metrics = est.evaluate(test.df, label_cols=["label"], **columns)
    ideal = synthetic.auc(frame["label"][begin:], chance[begin:])
    auc = next(value for name, value in metrics.items() if "auc" in name.lower())
    return {"auc": float(auc), "ideal auc": float(ideal)}


def pipeline(numbers, categories):
    return (
        FeaturePipeline()
        .cross_columns([categories[:2]], [1000])
        .category_encode(categories, freq_limit=3)
        .fillna(0, [*categories, *numbers])
        .log(numbers)
        .min_max_scale(numbers, clip=True)
    )


def chosen_films(argv, name):
    """Train NCF on chosen films."""
    options = of_films(argv, lr=0.01)
    train, test, schema, chance = films.pairs(options)
    est = estimator(lambda config: models.ncf(schema), "binary_crossentropy", options)
    columns = {"feature_cols": ["user", "item"], "batch_size": options.batch_size}
    est.fit(train.df, epochs=options.epochs, label_cols="label", seed=options.seed, **columns)
    return films.hit_rates(est.predict(test.df, **columns), chance)


def vectors_of_films(argv, name):
    """Train a two-tower model, whose towers predict separate tables."""
    options = of_films(argv, lr=0.005)
    train, test, users, items, schema, counts, chance = films.towers(options)
    est = estimator(
        lambda config: models.two_tower(schema, films.USER, films.ITEM, dim=32, hidden=(64,)),
        models.InBatchSoftmax(TEMPERATURE, counts),
        options,
    )
    columns = {"feature_cols": [*films.USER, *films.ITEM], "batch_size": options.batch_size}
    est.fit(train.df, epochs=options.epochs, label_cols="item", seed=options.seed, **columns)
    vectors = []
    for side, table, names in (("user", users, films.USER), ("item", items, films.ITEM)):
        tower = Estimator.from_keras(model=est.get_model().get_layer(f"{side}_tower"))
        predicted = tower.predict(table.df, feature_cols=names, batch_size=1024)
        vectors.append(films.as_matrix(predicted, side))
    return films.hit_rates(films.scored(test, *vectors, counts, TEMPERATURE), chance)


def of_films(argv, lr):
    size, data = {"users": 300, "items": 200}, "MovieLens 100K"
    options = programs.parse(argv, __doc__, size=size, epochs=10, lr=lr, data=data)
    programs.start(options)
    return options


def likes_and_retweets(argv, name):
    """Train MMoE on likes and retweets, with one output and column per task."""
    options = programs.parse(argv, __doc__, size={"rows": 20000}, epochs=5, lr=0.003)
    programs.start(options)
    train, test, chance = engagements.prepare(options)
    labels, schema = engagements.LABELS, train.feature_schema()
    tasks = [f"{label}_probability" for label in labels]
    categories, numbers = engagements.CATEGORIES, engagements.NUMBERS
    est = estimator(
        lambda config: models.mmoe(schema, categories, numbers, tasks, dim=8, dropout=0.2),
        "binary_crossentropy",
        options,
    )
    columns = {"feature_cols": [*categories, *numbers], "batch_size": options.batch_size}
    est.fit(train.df, epochs=options.epochs, label_cols=labels, seed=options.seed, **columns)
    return engagements.metrics_of(est.predict(test.df, output_cols=tasks, **columns), tasks, chance)


def estimator(model_creator, loss, options, **more):
    def compile_args(config):
        import keras

        return {"optimizer": keras.optimizers.Adam(config["lr"]), "loss": loss, **more}

    return Estimator.from_keras(
        model_creator=model_creator,
        compile_args_creator=compile_args,
        config={"lr": options.lr},
        workers_per_node=options.workers,
    )


PROGRAMS = {
    "deepfm": clicks,
    "wide_and_deep": clicks,
    "ncf": chosen_films,
    "two_tower": vectors_of_films,
    "mmoe": likes_and_retweets,
}


def main(argv=None):
    choice = argparse.ArgumentParser(add_help=False)
    choice.add_argument("--model", choices=list(PROGRAMS), default="deepfm")
    chosen, rest = choice.parse_known_args(argv)
    return programs.report(PROGRAMS[chosen.model](rest, chosen.model))


if __name__ == "__main__":
    main()
    stop_orca_context()
