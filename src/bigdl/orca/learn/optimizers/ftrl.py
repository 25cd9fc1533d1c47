"""FTRL-proximal (McMahan et al. 2013, "Ad Click Prediction: a View from the Trenches")."""

import torch

from bigdl.orca.parameter_layer.lars import SliceOptimizer


class TorchFtrl(SliceOptimizer):
    """FTRL-proximal optimizer (follow the regularized leader).

    Parameters
    ----------
    params : iterable
    lr : float
    power : float
        Exponent of the accumulated squares in the learning rate; at most 0.
    start : float
        Initial value of the accumulated squares.
    l1, l2 : float
        Regularization of the weights; `l1` makes them sparse.
    shrinkage : float
        L2 penalty that is added to the gradient only.
    """

    elementwise = True  # the parameter layer may slice parameters

    def __init__(self, params, lr=1e-3, power=-0.5, start=0.1, l1=0.0, l2=0.0, shrinkage=0.0):
        super().__init__(params, lr=lr, power=power, start=start, l1=l1, l2=l2, shrinkage=shrinkage)

    def _update(self, parameter, group, norms):
        gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
        state = self.state[parameter]
        if not state:
            state["squares"] = torch.full_like(parameter, group["start"])
            state["linear"] = torch.zeros_like(parameter)
        before, linear, lr, power = state["squares"], state["linear"], group["lr"], group["power"]
        squares = before + gradient * gradient
        sigma = (squares.pow(-power) - before.pow(-power)) / lr
        linear += gradient + 2 * group["shrinkage"] * parameter - sigma * parameter
        quadratic = squares.pow(-power) / lr + 2 * group["l2"]
        shrunk = linear.clamp(-group["l1"], group["l1"]) - linear
        parameter.copy_(shrunk / quadratic)
        state["squares"] = squares
