"""Row-wise Adagrad optimizer for embedding tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, overload

import torch

from bigdl.common.checks import check_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.optim.optimizer import ParamsT


class RowwiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row of an embedding.

    A row's accumulator grows by the mean of its squared gradient and scales down the row's learning
    rate. Only the rows of a sparse gradient are read and written. Weights with dense gradients are
    updated as in :class:`torch.optim.Adagrad`, so one optimizer is enough for a recommender. For an
    embedding of width d, the state is d times smaller than that of Adagrad.

    Parameters
    ----------
    params : iterable
        Parameters, or groups of them.
    lr : float
        Learning rate.
    eps : float
        Term added to the square root of the accumulator.
    initial_accumulator_value : float
        Initial value of the accumulators.

    Notes
    -----
    Source: the row-wise Adagrad of FBGEMM and TorchRec (Mudigere et al., "Software-Hardware
    Co-design for Fast and Scalable Training of Deep Learning Recommendation Models", ISCA 2022).

    Examples
    --------
    >>> import torch
    >>> from bigdl.orca.torch import RowwiseAdagrad
    >>> table = torch.nn.Embedding(4, 2, sparse=True)
    >>> optimizer = RowwiseAdagrad(table.parameters(), lr=0.1)
    >>> table(torch.tensor([1, 1])).sum().backward()
    >>> optimizer.step()
    >>> optimizer.state[table.weight]["sum"]
    tensor([0., 4., 0., 0.])
    """

    elementwise = by_row = True  # see bigdl.orca.parameter_layer.optimizers

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.01,
        eps: float = 1e-10,
        initial_accumulator_value: float = 0.0,
    ):
        check_number("RowwiseAdagrad: lr", lr, above=0)
        check_number("RowwiseAdagrad: eps", eps, above=0)
        check_number(
            "RowwiseAdagrad: initial_accumulator_value", initial_accumulator_value, least=0
        )
        defaults = {"lr": lr, "eps": eps, "initial_accumulator_value": initial_accumulator_value}
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update the weights.

        Parameters
        ----------
        closure : callable, optional
            Recomputes the loss and returns it.

        Returns
        -------
        object
            The result of `closure`, or None.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)
        return loss

    def _update(self, parameter: torch.Tensor, group: dict) -> None:
        gradient, state = parameter.grad, self.state[parameter]
        assert gradient is not None
        if "sum" not in state:
            shape = parameter.shape[:1] if gradient.is_sparse else parameter.shape
            state["sum"] = parameter.new_full(shape, group["initial_accumulator_value"])
        sums, lr, eps = state["sum"], group["lr"], group["eps"]
        is_by_row = sums.dim() < parameter.dim()
        if gradient.is_sparse and is_by_row:
            gradient = gradient.coalesce()
            indices, values = gradient._indices()[0], gradient._values()
            grown = sums.index_select(0, indices).add_(_mean_of_squares(values))
            sums.index_copy_(0, indices, grown)
            rows = parameter.index_select(0, indices)
            rows.addcdiv_(values, _by_row(grown.sqrt().add_(eps), values), value=-lr)
            parameter.index_copy_(0, indices, rows)
            return
        dense = gradient.to_dense() if gradient.is_sparse else gradient
        if is_by_row:  # an embedding table whose gradient is dense in this step
            sums.add_(_mean_of_squares(dense))
            parameter.addcdiv_(dense, _by_row(sums.sqrt().add_(eps), dense), value=-lr)
        else:
            sums.addcmul_(dense, dense)
            parameter.addcdiv_(dense, sums.sqrt().add_(eps), value=-lr)


def _mean_of_squares(values: torch.Tensor) -> torch.Tensor:
    return values.square().flatten(1).mean(1)


def _by_row(factors: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return factors.view(-1, *[1] * (values.dim() - 1))
