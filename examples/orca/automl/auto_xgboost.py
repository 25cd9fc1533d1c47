"""Search the best XGBoost regressor for scikit-learn's diabetes data, with Optuna.

Run it with ``python examples/orca/automl/auto_xgboost.py``; ``--help`` lists the options.
"""

import argparse

from sklearn.datasets import load_diabetes
from sklearn.metrics import root_mean_squared_error
from sklearn.model_selection import train_test_split

from bigdl.orca import init_orca_context, stop_orca_context
from bigdl.orca.automl import hp
from bigdl.orca.automl.xgboost import AutoXGBRegressor


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--backend", default="ray", choices=["ray", "local"])
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--trials", type=int, default=15)
    parser.add_argument("--logs", default="/tmp/auto_xgboost")
    options = parser.parse_args(arguments)

    started = None
    if options.backend == "ray":
        started = init_orca_context(runtime="ray", cores=options.cores)
    frame = load_diabetes(as_frame=True).frame
    features = [name for name in frame.columns if name != "target"]
    train, test = train_test_split(frame, test_size=0.25, random_state=0)

    auto_xgb = AutoXGBRegressor(
        logs_dir=options.logs, cpus_per_trial=1, name="diabetes", backend=options.backend
    )
    auto_xgb.fit(
        train,
        validation_data=test,
        feature_cols=features,
        label_cols="target",
        metric="rmse",
        n_sampling=options.trials,
        concurrency=options.cores,
        search_space={
            "n_estimators": hp.qrandint(20, 200, 20),
            "max_depth": hp.randint(1, 6),
            "learning_rate": hp.loguniform(1e-2, 3e-1),
            "min_child_weight": hp.choice([1, 5, 20]),
        },
        search_alg="optuna",
    )
    print(auto_xgb.trials().to_string())
    print("best configuration:", auto_xgb.get_best_config())
    model = auto_xgb.get_best_model()
    rmse = root_mean_squared_error(test["target"], model.predict(test[features].to_numpy()))
    print(f"rmse of the best model: {rmse:.2f}")
    if started is not None:
        stop_orca_context()
    return {"rmse": rmse, "trials": auto_xgb.trials()}


if __name__ == "__main__":
    main()
