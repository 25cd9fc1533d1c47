"""What ends a trial between epochs, also where it trains in processes of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import keras

__all__ = ["EpochReports", "judge_of"]

Judge = Callable[[float, int], bool]
"""Takes the figure of an epoch; whether the trial is to be given up."""


class EpochReports(keras.callbacks.Callback):
    """Tells a judge of each epoch, and ends the training if the trial does not look promising.

    Parameters
    ----------
    judge : callable
        Of :func:`judge_of`.
    metric : str

    Attributes
    ----------
    epochs : int
        How many there were.
    pruned : bool
    """

    def __init__(self, judge: Judge, metric: str):
        super().__init__()
        self._judge = judge
        self._metric = metric
        self.epochs = 0
        self.pruned = False

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.epochs = epoch + 1
        if self._metric not in (logs or {}):
            return
        if self._judge(float(logs[self._metric]), epoch):
            self.pruned = True
            self.model.stop_training = True


@contextmanager
def judge_of(trial: Any, elsewhere: bool) -> Iterator[Judge]:
    """The judge of a trial's epochs.

    Parameters
    ----------
    trial : optuna.trial.Trial
    elsewhere : bool
        Whether it is asked by another process of this machine, to which it is sent. There is no
        trial there: its study may be in this process's memory.
    """

    def judge(figure: float, epoch: int) -> bool:
        trial.report(figure, epoch)
        return trial.should_prune()

    if not elsewhere:
        yield judge
        return
    key = os.urandom(32)
    with Listener(("127.0.0.1", 0), authkey=key) as listener:
        court = threading.Thread(target=_hold_court, args=(listener, judge), daemon=True)
        court.start()
        asked = _AskedFromElsewhere(listener.address, key)
        try:
            yield asked
        finally:
            asked.close()
            court.join()


@dataclass(frozen=True)
class _AskedFromElsewhere:
    """Asks a judge who sits in another process."""

    address: tuple[str, int]
    key: bytes

    def __call__(self, figure: float, epoch: int) -> bool:
        with Client(self.address, authkey=self.key) as connection:
            connection.send((figure, epoch))
            answer = connection.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def close(self) -> None:
        with Client(self.address, authkey=self.key) as connection:
            connection.send(None)


def _hold_court(listener: Listener, judge: Judge) -> None:
    while True:
        # A process may have ended before it was answered, and others may knock at the port.
        with suppress(AuthenticationError, EOFError, OSError), listener.accept() as connection:
            question = connection.recv()
            if question is None:
                return
            _answer(connection, judge, question)


def _answer(connection: Connection, judge: Judge, question: tuple[float, int]) -> None:
    try:
        answer: Any = bool(judge(*question))
    except Exception as error:
        answer = error
    connection.send(answer)
