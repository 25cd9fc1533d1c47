"""Programs for a classic Spark and for Spark Connect: only ``init_orca_context`` differs.

Run as ``connect_program.py NAME URL FOLDER``, where URL is ``local`` for a classic Spark.
"""

import json
import os
import pickle
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

warnings.simplefilter("ignore")
sys.path.insert(0, str(Path(__file__).parent))

import faults  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

from bigdl.orca import OrcaContext, init_orca_context, stop_orca_context  # noqa: E402
from bigdl.orca.learn.pytorch import Estimator  # noqa: E402
from bigdl.orca.learn.trigger import SeveralIteration  # noqa: E402

URL, FOLDER = sys.argv[2], Path(sys.argv[3])


def start():
    if URL == "local":
        init_orca_context("local", cores=2)
    else:
        init_orca_context("spark-connect", master=URL)
    return OrcaContext.get_spark_session()


def train():
    """Weights, figures and predictions of an input with uneven and empty partitions."""
    spark = start()
    rows = spark.range(0, 700, 1, 7).where("id < 100 or id >= 237 and id % 3 > 0")
    frame = rows.selectExpr("id", "array(sin(id), cos(id)) as x", "double(id % 5) as y")
    losses = []

    def model(config):
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    est = Estimator.from_torch(
        model=model,
        optimizer=lambda model, config: torch.optim.Adam(model.parameters(), lr=0.01),
        loss=torch.nn.MSELoss(),
        metrics=["mse"],
        workers_per_node=2,
        model_dir=str(FOLDER / "model"),
    )
    columns = {"feature_cols": ["x"], "label_cols": ["y"]}
    figures = est.fit(frame, epochs=2, batch_size=32, seed=3, validation_data=frame, **columns)
    losses += [{k: v for k, v in epoch.items() if "loss" in k or "mse" in k} for epoch in figures]
    losses.append(est.evaluate(frame, batch_size=32, **columns))
    est.save(str(FOLDER / "saved"))
    est.load(str(FOLDER / "saved"))
    predicted = est.predict(frame, feature_cols=["x"])
    assert predicted.columns == ["id", "x", "y", "prediction"]
    arrays = est.predict(np.ones((5, 2), np.float32))
    weights = [value.numpy().tobytes() for value in est.get_model().state_dict().values()]
    rows = [tuple(row) for row in predicted.collect()]
    (FOLDER / "result").write_bytes(pickle.dumps((weights, losses, rows, arrays.tobytes())))


def restarted():
    """A fit whose server is killed, and another one that goes on."""

    def fit(**options):
        est = faults.estimator(model_dir=str(FOLDER / "model"))
        stop = Stop(FOLDER / "marker", 0, 17)
        trigger = SeveralIteration(5)
        data = faults.frame(OrcaContext.get_spark_session())
        return faults.fit(est, data, stop, checkpoint_trigger=trigger, **options)

    class Stop(faults.Once):
        def act(self, runner):
            time.sleep(60)

    start()
    try:
        fit()
    except Exception as error:
        (FOLDER / "error").write_text(f"{type(error).__name__}: {error}")
    while not (FOLDER / "again").exists():
        time.sleep(0.1)
    start()
    (FOLDER / "result").write_text(json.dumps(fit(resume="auto")))


def where_modules_are():
    """The file of a module of BigDL in the workers."""
    from bigdl.orca.engine import ConnectEngine

    start()

    def program(worker):
        import bigdl.runtime.task

        return bigdl.runtime.task.__file__

    (FOLDER / "result").write_text(json.dumps(ConnectEngine().run(program, num_workers=2)))


def interrupted():
    """Ctrl-C while workers wait in a collective that never ends."""
    from bigdl.orca.engine import ConnectEngine

    start()

    def program(worker):
        (FOLDER / f"pid-{worker.rank}").write_text(str(os.getpid()))
        time.sleep(600)

    def press():
        while len(list(FOLDER.glob("pid-*"))) < 2:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    for rendezvous in ("driver", "rank0"):
        for file in FOLDER.glob("pid-*"):
            file.unlink()
        threading.Thread(target=press, daemon=True).start()
        try:
            ConnectEngine(rendezvous=rendezvous).run(program, num_workers=2)
        except KeyboardInterrupt:
            pids = [int(file.read_text()) for file in FOLDER.glob("pid-*")]
            (FOLDER / f"interrupted-{rendezvous}").write_text(json.dumps(pids))


if __name__ == "__main__":
    {each.__name__: each for each in (train, restarted, interrupted, where_modules_are)}[
        sys.argv[1]
    ]()
    stop_orca_context()
