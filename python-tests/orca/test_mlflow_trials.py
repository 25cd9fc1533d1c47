"""Test the trials of a search as runs of MLflow."""

import pytest

from bigdl.tuning import open_study, optimize

mlflow = pytest.importorskip(
    "mlflow", reason="MLflow is not installed: pip install 'bigdl[mlflow]'"
)


@pytest.fixture(scope="module")
def tracking(tmp_path_factory):
    before = mlflow.get_tracking_uri()
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/trials.db")
    yield
    mlflow.set_tracking_uri(before)


def objective(trial):
    import optuna

    x = trial.suggest_int("x", 0, 2)
    for step in range(3):
        trial.report(x + step, step)
    if x == 1:
        raise optuna.TrialPruned
    if x == 2:
        raise ValueError("two")
    return x


def test_ended_trials_are_runs_below_the_active_run(tracking):
    from bigdl.mlflow.tuning import MLflowTrials

    study = open_study(metric_names=["loss"], name="numbers")
    for x in range(3):
        study.enqueue_trial({"x": x})
    mlflow.set_experiment("search")
    with mlflow.start_run() as parent:
        callbacks = [MLflowTrials()]
        optimize(
            study,
            objective,
            3,
            backend="local",
            concurrency=1,
            catch=ValueError,
            callbacks=callbacks,
        )
    client = mlflow.MlflowClient()
    runs = client.search_runs(
        [parent.info.experiment_id], f"tags.mlflow.parentRunId = '{parent.info.run_id}'"
    )
    runs = {run.data.tags["trial"]: run for run in runs}
    assert sorted(runs) == ["0", "1", "2"]
    assert [runs[n].data.params["x"] for n in sorted(runs)] == ["0", "1", "2"]
    assert [runs[n].info.status for n in sorted(runs)] == ["FINISHED", "FINISHED", "FAILED"]
    assert [runs[n].data.tags["state"] for n in sorted(runs)] == ["COMPLETE", "PRUNED", "FAIL"]
    assert {run.data.tags["study"] for run in runs.values()} == {"numbers"}
    assert runs["0"].data.metrics == {"loss": 0, "report": 2}
    reports = client.get_metric_history(runs["1"].info.run_id, "report")
    assert [(each.step, each.value) for each in reports] == [(0, 1), (1, 2), (2, 3)]


def test_a_trial_with_many_reports_is_logged_in_few_requests(tracking, monkeypatch):
    from bigdl.mlflow.tuning import MLflowTrials

    def reports(trial):
        for step in range(1000):
            trial.report(step, step)
        return 1

    study = open_study(metric_names=["loss"])
    batches = []
    log_batch = mlflow.MlflowClient.log_batch

    def counted(client, run_id, metrics=(), params=(), tags=(), **options):
        batches.append(len(metrics))
        return log_batch(client, run_id, metrics, params, tags, **options)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", counted)
    study.optimize(reports, n_trials=1, callbacks=[MLflowTrials("many")])
    runs = mlflow.search_runs(experiment_names=["many"])
    assert runs[["metrics.report", "metrics.loss"]].to_numpy().tolist() == [[999, 1]]
    assert batches == [900, 101]


def test_an_error_of_the_server_does_not_end_the_search(tracking, monkeypatch, caplog):
    from bigdl.mlflow.tuning import MLflowTrials

    def fails(*arguments, **options):
        raise OSError("the server is full")

    callback = MLflowTrials("full")
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", fails)
    study = open_study()
    study.optimize(lambda trial: 1, n_trials=2, callbacks=[callback])
    assert [trial.value for trial in study.trials] == [1, 1]
    assert "the server is full" in caplog.text
    runs = mlflow.search_runs(experiment_names=["full"])
    assert runs["status"].tolist() == ["FAILED", "FAILED"]


def test_an_experiment_of_another_name_is_created(tracking):
    from bigdl.mlflow.tuning import MLflowTrials

    study = open_study(directions=["minimize", "maximize"])
    study.optimize(lambda trial: (1, 2), n_trials=1, callbacks=[MLflowTrials("other")])
    runs = mlflow.search_runs(experiment_names=["other"])
    assert runs[["metrics.value_0", "metrics.value_1"]].to_numpy().tolist() == [[1, 2]]
