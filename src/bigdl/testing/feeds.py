"""Contract tests of feeds."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from bigdl.common.errors import UsageError
from bigdl.orca.data.feeds import Feed, as_feed, input_type_of
from bigdl.orca.learn.pytorch import Estimator
from bigdl.runtime.engine import Engine
from bigdl.runtime.local import LocalEngine

if TYPE_CHECKING:
    import numpy.typing as npt
    from numpy.typing import ArrayLike

    from bigdl.runtime.worker import Worker

__all__ = ["FeedContract"]

_RATE = 0.01
_CONFIG = {"dtype": "float64", "shuffle": False}


def _rows_of(arrays: Sequence[npt.NDArray[Any]]) -> list[tuple[float, ...]]:
    """Return the rows of arrays, sorted by their values."""
    flat = [np.asarray(array, np.float64).reshape(len(array), -1) for array in arrays]
    return sorted(tuple(row) for row in np.concatenate(flat, axis=1).tolist())


class FeedContract:
    """Contract tests of a Feed whose workers spool rows; pytest runs subclasses named ``Test...``.

    Attributes
    ----------
    feature_cols, label_cols : sequence of str, optional
        Arguments of ``fit`` for the input.
    backend : str, default "local"
        Backend of the Estimator.

    Examples
    --------
    >>> import numpy as np
    >>> from bigdl.testing.feeds import FeedContract
    >>> class TestTuples(FeedContract):
    ...     def data(self):
    ...         return self.expected()
    ...     def expected(self):
    ...         return np.arange(10.0).reshape(5, 2), np.arange(5.0)
    ...     def data_to_predict(self):
    ...         return self.expected()[0]
    >>> TestTuples().test_every_row_reaches_one_worker()  # pytest runs this and the others
    """

    feature_cols: Sequence[str] | None = None
    label_cols: Sequence[str] | None = None
    backend: str = "local"

    def data(self) -> object:
        """Return the input as a user passes it to ``fit``."""
        raise NotImplementedError(f"{type(self).__name__} needs a method data()")

    def expected(self) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return features of shape (rows, n) and targets of shape (rows,), in input order."""
        raise NotImplementedError(f"{type(self).__name__} needs a method expected()")

    def data_to_predict(self) -> object:
        """Return the input as a user passes it to ``predict``; by default :meth:`data`."""
        return self.data()

    def predictions(self, predicted: ArrayLike) -> npt.NDArray[Any]:
        """Convert the result of ``predict`` to an array with one entry per row."""
        return np.asarray(predicted)

    def engine(self) -> Engine:
        """Return the engine whose workers receive the rows."""
        return LocalEngine(workers_per_node=2)

    def _feed(self) -> Feed:
        return as_feed(self.data(), self.feature_cols, self.label_cols, _CONFIG)

    def test_the_chooser_takes_it(self) -> None:
        """Check that the input is recognized and that its feed's ``kind`` names the input type."""
        feed, data = self._feed(), self.data()
        assert isinstance(feed, Feed)
        assert input_type_of(data) == feed.kind

    def test_every_row_reaches_one_worker(self) -> None:
        """Check that every row reaches exactly one worker for one and two workers."""

        def program(worker: Worker) -> bytes:
            return pickle.dumps([np.array(array) for array in worker.shard.arrays])

        wanted = _rows_of(self.expected())
        for workers in (1, 2):
            parts = self.engine().run(program, self._feed(), num_workers=workers)
            shards = [pickle.loads(part) for part in parts]
            rows = [row for shard in shards if len(shard[0]) for row in _rows_of(shard)]
            assert sorted(rows) == wanted, f"{workers} workers"

    def test_equal_input_gives_an_equal_order(self) -> None:
        """Check that two jobs with equal numbers of workers get the same rows in the same order."""

        def program(worker: Worker) -> list[object]:
            return [worker.shard.rows, worker.shard.fingerprint]

        first, second = (self.engine().run(program, self._feed(), num_workers=2) for _ in range(2))
        assert first == second

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        features, targets = (np.asarray(each, np.float64) for each in self.expected())
        return torch.tensor(features), torch.tensor(targets)

    def _model(self) -> torch.nn.Linear:
        model = torch.nn.Linear(self._tensors()[0].shape[1], 1).double()
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.1)
        return model

    def _estimator(self) -> Any:
        loss, saved = torch.nn.MSELoss(), pickle.dumps(self._model())
        return Estimator.from_torch(
            model=lambda config: pickle.loads(saved),
            optimizer=lambda model, config: torch.optim.SGD(model.parameters(), lr=_RATE),
            loss=lambda preds, target: loss(preds.reshape(-1), target.reshape(-1)),
            backend=self.backend,
            workers_per_node=2,
            config=_CONFIG,
            log_to_driver=False,
        )

    def test_it_trains_and_evaluates_as_arrays_do(self) -> None:
        """Check that two workers train and evaluate like one process on all rows."""
        features, targets = self._tensors()
        est, model, rows = self._estimator(), self._model(), len(features)
        columns = {"feature_cols": self.feature_cols, "label_cols": self.label_cols}
        est.fit(self.data(), epochs=2, batch_size=rows, **columns)
        loss, optimizer = torch.nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=_RATE)
        for _ in range(2):
            optimizer.zero_grad()
            loss(model(features)[:, 0], targets).backward()
            optimizer.step()
        for trained, wanted in zip(est.get_model().parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(trained.detach(), wanted.detach(), rtol=1e-9, atol=1e-12)
        stats = est.evaluate(self.data(), batch_size=rows, **columns)
        assert stats["num_samples"] == rows
        assert abs(stats["val_loss"] - loss(model(features)[:, 0], targets).item()) < 1e-9

    def test_it_is_predicted_in_order(self) -> None:
        """Check that predictions keep the row order, or that the input type is refused."""
        features, _ = self._tensors()
        try:
            predicted = self._estimator().predict(
                self.data_to_predict(), feature_cols=self.feature_cols
            )
        except UsageError as error:
            if error.code != "data-type":
                raise
        else:
            actual = self.predictions(predicted).reshape(-1)
            expected = self._model()(features)[:, 0].detach().numpy()
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)
