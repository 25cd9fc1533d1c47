"""The Estimator on executors of their own: nothing works in one process only."""

import numpy as np
import pytest
import torch
from reference_training import largest_difference, rows_of
from torch import nn

from bigdl.orca.learn.metrics import AUC, Accuracy
from bigdl.orca.learn.pytorch import Estimator
from bigdl.orca.learn.pytorch.callbacks import Callback
from bigdl.orca.learn.trigger import SeveralIteration

COLUMNS = {"feature_cols": ["x"], "label_cols": ["c"]}


class Net(nn.Module):
    """Defined in a module that the executors do not have."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(
            nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 1), nn.Sigmoid()
        )

    def forward(self, x):
        return self.layers(x)


def estimator(**options):
    return Estimator.from_torch(
        model=lambda config: Net(),
        optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=0.01),
        loss=nn.BCELoss(),
        metrics=[Accuracy(), AUC()],
        **options,
    )


@pytest.fixture(scope="module")
def frame(local_cluster):
    (shard,) = rows_of([60], classes=2)
    rows = zip(range(60), shard["x"].tolist(), shard["c"].tolist(), strict=True)
    return local_cluster.createDataFrame(list(rows), "id long, x array<double>, c int").cache()


class Executors(Callback):
    def __init__(self, folder):
        self.folder = folder

    def before_run(self, runner):
        import os

        (self.folder / f"{runner.rank}").write_text(os.environ["SPARK_LOCAL_DIRS"])


@pytest.mark.slow
def test_every_node_has_a_worker(frame, tmp_path):
    estimator().fit(frame, batch_size=10, callbacks=[Executors(tmp_path)], **COLUMNS)
    directories = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert set(directories) == {"0", "1"}
    assert directories["0"] != directories["1"]


def test_fit_evaluate_and_predict(frame):
    est = estimator()
    stats = est.fit(frame, epochs=3, batch_size=10, seed=2, validation_data=frame, **COLUMNS)
    assert [s["num_samples"] for s in stats] == [60] * 3
    found = est.evaluate(frame, **COLUMNS)
    assert found["val_loss"] == pytest.approx(stats[2]["val_loss"], rel=1e-6)
    rows = est.predict(frame, feature_cols=["x"]).orderBy("id").collect()
    x = torch.tensor([r.x for r in rows])
    with torch.no_grad():
        expected = est.get_model().eval()(x)[:, 0].numpy()
    assert np.allclose([r.prediction for r in rows], expected, atol=1e-6)
    right = np.mean([(r.prediction >= 0.5) == r.c for r in rows])
    assert float(found["Accuracy"]) == pytest.approx(right)


class PowerCut(Callback):
    def before_train_iter(self, runner):
        if runner.global_step == 9:
            raise RuntimeError("power cut")


@pytest.mark.slow
def test_an_interrupted_run_equals_a_whole_one(frame, tmp_path):
    options = {"epochs": 3, "batch_size": 10, "seed": 2, **COLUMNS}
    whole = estimator()
    expected = whole.fit(frame, **options)
    first = estimator(model_dir=str(tmp_path))
    with pytest.raises(RuntimeError, match="power cut"):
        first.fit(frame, callbacks=[PowerCut()], checkpoint_trigger=SeveralIteration(2), **options)
    again = estimator(model_dir=str(tmp_path))
    assert again.fit(frame, resume="auto", **options) == expected
    weights = [est.get_model().state_dict() for est in (again, whole)]
    assert largest_difference(*weights) == 0
