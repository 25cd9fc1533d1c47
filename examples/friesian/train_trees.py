"""Gradient-boosted trees on Spark, with XGBoost or LightGBM as a Spark ML stage.

    python examples/friesian/train_trees.py --library xgboost

The features are those of ``tree_features.py``: means and counts of categories, computed from
earlier rows only.  ``xgboost`` needs that package, ``lightgbm`` needs SynapseML, a Spark package.
"""

import programs
import synthetic
import tree_features
from pyspark.ml.feature import VectorAssembler
from pyspark.ml.functions import vector_to_array

from bigdl.dllib.nnframes.tree_model import LightGBMClassifier, XGBClassifier
from bigdl.orca import stop_orca_context


def stage(options):
    """Return the Spark ML stage of the selected library, with equivalent parameters."""
    if options.library == "xgboost":
        parameters = {"n_estimators": options.epochs, "max_depth": 5, "tree_method": "hist"}
        names = {"features_col": "features", "label_col": "like", "seed": options.seed}
        more = {"learning_rate": options.lr, "num_workers": options.workers}
        return XGBClassifier(parameters, **names, **more)
    parameters = {"numIterations": options.epochs, "maxDepth": 5, "learningRate": options.lr}
    return LightGBMClassifier(
        parameters, featuresCol="features", labelCol="like", numTasks=options.workers
    )


def main(argv=None):
    size, choices = {"rows": 20000}, {"library": ["xgboost", "lightgbm"]}
    options = programs.parse(argv, __doc__, size=size, epochs=60, lr=0.1, choices=choices)
    programs.start(options)
    trees = stage(options)
    train, test = tree_features.prepare(options)
    inputs = [name for name in train.columns if name not in ("id", "like")]
    assembler = VectorAssembler(inputCols=inputs, outputCol="features")

    model = trees.fit(assembler.transform(train.df))
    predicted = model.transform(assembler.transform(test.df))
    score = vector_to_array("probability")[1].alias("score")
    frame = predicted.select("like", "engaging_user_author_te_like", score).toPandas()
    auc = synthetic.auc(frame["like"], frame["score"])
    of_one = synthetic.auc(frame["like"], frame["engaging_user_author_te_like"])
    return programs.report({"auc": float(auc), "auc of one code": float(of_one)})


if __name__ == "__main__":
    main()
    stop_orca_context()
