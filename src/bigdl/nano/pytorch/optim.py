"""Adam optimizer for models with large sparse embeddings and dense layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast, overload

import torch
from torch.optim.adam import adam

from bigdl.common.checks import check_number
from bigdl.common.errors import UsageError

__all__ = ["SparseAdam"]


class SparseAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba, 2015) for sparse and dense gradients.

    ``torch.optim.Adam`` rejects the gradients of ``nn.Embedding(sparse=True)``, and
    ``torch.optim.SparseAdam`` rejects dense gradients. For a sparse gradient, only the rows in it
    are updated, including their moments ("lazy Adam"). Dense gradients use ordinary Adam.

    Parameters
    ----------
    params : iterable of Tensor or dict
        Parameters or parameter groups, as for any PyTorch optimizer.
    lr : float
    betas : tuple of two floats
        Decay rates of the first and second moment.
    eps : float

    Raises
    ------
    UsageError
        If a value is out of range.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.optim import SparseAdam
    >>> table = torch.nn.Embedding(1000, 8, sparse=True)
    >>> scores = torch.nn.Linear(8, 1)
    >>> before = table.weight.detach().clone()
    >>> optimizer = SparseAdam([*table.parameters(), *scores.parameters()], lr=0.01)
    >>> scores(table(torch.tensor([3, 7]))).sum().backward()
    >>> optimizer.step()
    >>> (table.weight != before).any(dim=1).nonzero().flatten()  # only the rows of the batch
    tensor([3, 7])
    """

    elementwise = by_row = True  # see bigdl.orca.parameter_layer.optimizers

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ):
        check_number("lr", lr, above=0)
        check_number("eps", eps, above=0)
        for index, beta in enumerate(betas):
            check_number(f"betas[{index}]", beta, 0, below=1)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all parameters that have a gradient.

        Parameters
        ----------
        closure : callable, optional
            Recomputes and returns the loss.

        Returns
        -------
        Tensor or None
            Loss returned by the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            parameters = [each for each in group["params"] if each.grad is not None]
            dense = [each for each in parameters if not each.grad.is_sparse]
            for parameter in parameters:
                if parameter.grad.is_sparse:
                    self._update_rows(parameter, group)
            if dense:
                self._update_all(dense, group)
        return loss

    def _moments(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        return state

    def _update_rows(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        gradient = cast("torch.Tensor", parameter.grad).coalesce()
        rows, values = gradient.indices()[0], gradient.values()
        if gradient.sparse_dim() != 1:
            raise UsageError(
                "SparseAdam takes gradients that are sparse in their rows, but one is sparse in "
                f"{gradient.sparse_dim()} dimensions",
                code="optimizer-unsupported",
            )
        state = self._moments(parameter)
        state["step"] += 1
        step, (beta1, beta2) = state["step"].item(), group["betas"]
        mean = state["exp_avg"][rows].lerp_(values, 1 - beta1)
        square = state["exp_avg_sq"][rows].mul_(beta2).addcmul_(values, values, value=1 - beta2)
        state["exp_avg"][rows], state["exp_avg_sq"][rows] = mean, square
        scale = (1 - beta2**step) ** 0.5
        divisor = square.sqrt_().div_(scale).add_(group["eps"])
        parameter.index_add_(0, rows, mean.div(divisor), alpha=-group["lr"] / (1 - beta1**step))

    def _update_all(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        states = [self._moments(parameter) for parameter in parameters]
        beta1, beta2 = group["betas"]
        adam(
            parameters,
            [cast("torch.Tensor", parameter.grad) for parameter in parameters],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
