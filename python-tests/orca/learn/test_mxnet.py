"""Models of MXNet train in an environment of their own."""

import numpy as np
import pytest
from mxnet_models import dense, mean_absolute_error, module, no_model, squared_error, squares
from refusals import refused

from bigdl.common.errors import UsageError, WorkerError
from bigdl.orca.learn.mxnet import Estimator, create_config
from bigdl.orca.learn.mxnet.environment import isolated_python

CONFIG = create_config("sgd", {"learning_rate": 0.1}, seed=1)


def rows():
    x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    return x, x @ np.array([[1], [2], [3]], np.float32)


def test_arguments_that_cannot_work():
    with refused("name-unknown", "'spark'", "'ray'", "'local'"):
        Estimator.from_mxnet(config=CONFIG, model_creator=dense, backend="mpi")
    with refused("argument-type", "model_creator"):
        Estimator.from_mxnet(config=CONFIG, model_creator=None)
    est = Estimator.from_mxnet(config=CONFIG, model_creator=dense, backend="local")
    with refused("not-fitted"):
        est.save("weights.params")


@pytest.fixture(scope="module")
def environment():
    try:
        isolated_python()
    except UsageError as error:
        pytest.skip(str(error))


def fitted(workers, backend, tmp_path, data=None, **columns):
    est = Estimator.from_mxnet(
        config=CONFIG,
        model_creator=dense,
        loss_creator=squares,
        eval_metrics_creator=squared_error,
        num_workers=workers,
        backend=backend,
    )
    figures = est.fit(rows() if data is None else data, 30, 64 // workers, **columns)
    path = est.save(str(tmp_path / f"{workers}.params"))
    est.shutdown()
    return figures, open(path, "rb").read()


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_two_workers_equal_one(tmp_path):
    ((one,), weights), (two, others) = (fitted(n, "local", tmp_path) for n in (1, 2))
    assert len(two) == 2
    assert one["mse"] < 0.1
    assert np.isclose(one["loss"], np.mean([each["loss"] for each in two]), rtol=1e-4)
    both = [np.frombuffer(each[-16:], np.float32) for each in (weights, others)]
    assert np.allclose(*both, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_dataframe_of_spark(tmp_path, orca_spark):
    x, y = rows()
    frame = orca_spark.createDataFrame(
        [(list(map(float, a)), float(b)) for a, (b,) in zip(x, y, strict=True)],
        "x array<float>, y float",
    )
    figures, _ = fitted(2, "spark", tmp_path, frame, feature_cols=["x"], label_cols=["y"])
    assert max(each["mse"] for each in figures) < 0.1


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_a_module_is_validated_and_goes_on():
    est = Estimator.from_mxnet(
        config=CONFIG,
        model_creator=module,
        eval_metrics_creator=squared_error,
        validation_metrics_creator=mean_absolute_error,
        num_workers=2,
        backend="local",
    )
    first = est.fit(rows(), 5, 16, validation_data=rows())
    again = est.fit(rows(), 25, 16, validation_data=rows())
    assert again[0]["validation_mae"] < 0.5 * first[0]["validation_mae"]
    est.shutdown()


@pytest.mark.slow
@pytest.mark.usefixtures("environment")
def test_the_error_of_a_function_is_told():
    est = Estimator.from_mxnet(
        config=CONFIG, model_creator=no_model, loss_creator=squares, num_workers=2, backend="local"
    )
    with pytest.raises(WorkerError, match="KeyError: 'layers'"):
        est.fit(rows(), 1, 16)
    est.shutdown()
