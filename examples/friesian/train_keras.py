"""DeepFM or Wide & Deep in Keras, on clicks like those of Criteo.

    python examples/friesian/train_keras.py --model deepfm

A pipeline learns vocabularies and extremes from the first days only; the last ones are the test.
"""

import argparse

import programs
import synthetic

from bigdl.friesian.feature import FeatureTable
from bigdl.friesian.feature.pipeline import FeaturePipeline
from bigdl.friesian.models import keras as models
from bigdl.orca import stop_orca_context
from bigdl.orca.learn.tf2 import Estimator


def pipeline(numbers, categories):
    return (
        FeaturePipeline()
        .cross_columns([categories[:2]], [1000])
        .category_encode(categories, freq_limit=3)
        .fillna(0, [*categories, *numbers])
        .log(numbers)
        .min_max_scale(numbers, clip=True)
    )


def main(argv=None):
    choice = argparse.ArgumentParser(add_help=False)
    choice.add_argument("--model", choices=["deepfm", "wide_and_deep"], default="deepfm")
    chosen, rest = choice.parse_known_args(argv)
    size = {"rows": 20000, "numbers": 13, "categories": 26}
    options = programs.parse(rest, __doc__, size=size, epochs=4, lr=0.003)
    programs.start(options)
    frame, chance = synthetic.criteo(options.rows, options.numbers, options.categories)
    clicks = FeatureTable.from_pandas(frame).repartition(options.cores).cache()
    numbers = [f"I{i}" for i in range(1, options.numbers + 1)]
    categories = [f"C{i}" for i in range(1, options.categories + 1)]
    begin = options.rows * 4 // 5
    fitted = pipeline(numbers, categories).fit(clicks.filter(f"id < {begin}"))
    train, test = (fitted.transform(clicks.filter(f"id {s} {begin}")) for s in ("<", ">="))
    schema, crosses = fitted.feature_schema(), ["_".join(categories[:2])]

    def model_creator(config):
        if chosen.model == "deepfm":
            return models.deepfm(schema, categories, numbers, dim=8, hidden=(64, 32), dropout=0.2)
        return models.wide_and_deep(
            schema, crosses, categories, numbers, dim=8, hidden=(64, 32), dropout=0.2
        )

    def compile_args(config):
        import keras

        optimizer = keras.optimizers.Adam(config["lr"])
        return {"optimizer": optimizer, "loss": "binary_crossentropy", "metrics": ["AUC"]}

    est = Estimator.from_keras(
        model_creator=model_creator,
        compile_args_creator=compile_args,
        config={"lr": options.lr},
        workers_per_node=options.workers,
    )
    features = [*(crosses if chosen.model == "wide_and_deep" else []), *categories, *numbers]
    columns = {"feature_cols": features, "batch_size": options.batch_size}
    est.fit(train.df, epochs=options.epochs, label_cols=["label"], seed=options.seed, **columns)
    found = est.evaluate(test.df, label_cols=["label"], **columns)
    ideal = synthetic.auc(frame["label"][begin:], chance[begin:])
    auc = next(value for name, value in found.items() if "auc" in name.lower())
    return programs.report({"auc": float(auc), "ideal auc": float(ideal)})


if __name__ == "__main__":
    main()
    stop_orca_context()
