"""Contract tests of metrics."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch

from bigdl.orca.learn.metrics import Metric, TorchMetric, merge_states

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MetricContract"]

_ROWS = 97


def _tensors(state: TorchMetric) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in state.state().items():
        joined = torch.cat(list(value)) if isinstance(value, list) else value
        yield key, joined


class MetricContract:
    """Contract tests of a metric; pytest runs the subclasses named ``Test...``.

    Attributes
    ----------
    metric : object
        A value for ``metrics=[metric]``: an Orca Metric, a name, an object with the interface of
        :class:`~bigdl.orca.learn.metrics.TorchMetric`, a torchmetrics object or a function.
    tolerance : float, default 1e-12
        Maximum relative difference of sums in the states between splits of the rows.
    has_plain_states : bool, default True
        Whether the state depends on the rows only, with sums in float64 or int64. False for
        torchmetrics objects, which count their updates.

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.learn.metrics import MSE
    >>> from bigdl.testing.metrics import MetricContract
    >>> class TestMSE(MetricContract):
    ...     metric = MSE()
    ...     def inputs(self, generator, rows):
    ...         return torch.rand(rows, generator=generator), torch.rand(rows, generator=generator)
    ...     def expected(self, preds, targets):
    ...         return ((preds - targets) ** 2).mean()
    >>> TestMSE().test_any_split_of_the_rows_gives_the_same()  # pytest runs this and the others
    """

    metric: object
    tolerance: float = 1e-12
    has_plain_states: bool = True

    def inputs(self, generator: torch.Generator, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Generate random predictions and targets with `rows` rows, using a random generator."""
        raise NotImplementedError(f"{type(self).__name__} needs a method inputs(generator, rows)")

    def expected(
        self, preds: npt.NDArray[np.generic], targets: npt.NDArray[np.generic]
    ) -> float | None:
        """Compute the metric with an independent implementation; return None if there is none."""
        return None

    def _state(self) -> TorchMetric:
        return Metric.convert_metrics_list([self.metric])[0]

    def _drawn(self, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs(torch.Generator().manual_seed(seed), _ROWS)

    def test_it_equals_an_independent_implementation(self) -> None:
        """Check that the metric is a float32 scalar and equals the expected value."""
        for seed in range(3):
            preds, targets = self._drawn(seed)
            state = self._state()
            state(preds, targets)
            value = state.compute()
            assert (value.ndim, value.dtype) == (0, torch.float32)
            expected = self.expected(preds.numpy(), targets.numpy())
            if expected is not None:
                wanted = torch.tensor(float(expected))
                torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-12)

    def test_any_split_of_the_rows_gives_the_same(self) -> None:
        """Check that the merged states of up to five workers equal the state of one worker."""
        for seed in range(10):
            preds, targets = self._drawn(seed)
            whole, union = self._state(), self._state()
            whole(preds, targets)
            cuts = np.random.default_rng(seed).integers(0, _ROWS + 1, seed % 5)
            states = []
            for rows in np.split(np.arange(_ROWS), np.sort(cuts)):
                worker = self._state()
                for batch in np.split(rows, range(11, len(rows), 11)):
                    worker(preds[batch], targets[batch])
                states.append(worker.state())
            merged = merge_states(states, union.reductions)
            union.load_state(merged)
            pairs = zip(_tensors(whole), _tensors(union), strict=True)
            for (key, tensor), (_, joined) in pairs if self.has_plain_states else ():
                assert joined.dtype == tensor.dtype, key
                torch.testing.assert_close(joined, tensor, rtol=self.tolerance, atol=0)
            rounding = max(2e-7, self.tolerance)
            torch.testing.assert_close(union.compute(), whole.compute(), rtol=rounding, atol=0)

    def test_without_rows_it_is_not_a_number(self) -> None:
        """Check that the metric is NaN without rows, even after merging empty states."""
        preds, targets = self._drawn()
        empty = self._state()
        assert empty.compute().isnan()
        empty(preds[:0], targets[:0])
        assert empty.compute().isnan()
        empty.merge(self._state().state())
        assert empty.compute().isnan()

    def test_a_batch_is_not_changed_and_needs_no_gradient(self) -> None:
        """Check that batches stay unchanged and the state has no gradient."""
        preds, targets = self._drawn()
        batch = preds.clone().requires_grad_(preds.is_floating_point()), targets.clone()
        state = self._state()
        state(*batch)
        assert torch.equal(batch[0], preds)
        assert torch.equal(batch[1], targets)
        assert not any(tensor.requires_grad for _, tensor in _tensors(state))
        assert not state.compute().requires_grad

    def test_a_state_is_a_copy_on_the_cpu_in_wide_types(self) -> None:
        """Check that states are CPU copies with wide dtypes for sums."""
        preds, targets = self._drawn()
        state = self._state()
        state(preds, targets)
        before = state.compute()
        for key, tensor in _tensors(state):
            assert tensor.device.type == "cpu"
            if self.has_plain_states and state.reductions[key] == "sum":
                assert tensor.dtype in (torch.float64, torch.int64), key
            tensor.zero_()
        preds.zero_()
        assert torch.equal(state.compute(), before)

    def test_a_state_can_be_reset_pickled_and_fed_after_a_merge(self) -> None:
        """Check that a state can be reset, merged, pickled and updated further."""
        preds, targets = self._drawn()
        whole, other = self._state(), self._state()
        whole(preds, targets)
        state: TorchMetric = pickle.loads(pickle.dumps(self._state()))
        state(preds[60:], targets[60:])
        state.reset()
        state(preds[:30], targets[:30])
        other(preds[30:50], targets[30:50])
        state.merge(other.state())
        state = pickle.loads(pickle.dumps(state))
        state(preds[50:], targets[50:])
        rounding = max(2e-7, self.tolerance)
        torch.testing.assert_close(state.compute(), whole.compute(), rtol=rounding, atol=0)

    def test_a_row_of_weight_k_counts_as_k_rows(self) -> None:
        """Check that a row of weight k counts like k rows, if the metric accepts weights."""
        if not self._state().takes_weights:
            return
        preds, targets = self._drawn()
        times = torch.randint(0, 4, (_ROWS,), generator=torch.Generator().manual_seed(5))
        repeated = self._state()
        repeated(preds.repeat_interleave(times, 0), targets.repeat_interleave(times, 0))
        for factor in (1, 0.3):
            states = []
            for rows in (slice(0, 40), slice(40, 41), slice(41, None), slice(0, 0)):
                worker = self._state()
                worker(preds[rows], targets[rows], factor * times[rows, None])
                states.append(worker.state())
            weighted = self._state()
            weighted.load_state(merge_states(states, weighted.reductions))
            torch.testing.assert_close(weighted.compute(), repeated.compute(), rtol=1e-6, atol=0)
