"""A search by two processes: one is killed in its second trial, and later a trial has no end."""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytorch_lightning as pl
from search_models import line

from bigdl.nano.pytorch import Trainer

STORAGE, REACHED = sys.argv[1], Path(sys.argv[2])


class Fate(pl.Callback):
    """What happens to trials; those of both processes count together, by files."""

    def on_fit_start(self, trainer, pl_module):
        begun = sum(1 for _ in REACHED.parent.glob("trial-*"))
        (REACHED.parent / f"trial-{os.getpid()}-{time.monotonic_ns()}").touch()
        if begun >= 1:
            with suppress(FileExistsError):
                (REACHED.parent / "killed").mkdir()
                os.kill(os.getpid(), signal.SIGKILL)
        if begun >= 5:
            REACHED.touch()
            time.sleep(600)


if __name__ == "__main__":
    trainer = Trainer(use_hpo=True, max_epochs=1, callbacks=[Fate()], tune_process=False)
    trainer.search(
        line(),
        target_metric="val_loss",
        n_trials=10,
        n_parallels=2,
        storage=STORAGE,
        study_name="line",
    )
