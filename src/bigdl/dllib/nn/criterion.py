"""Losses of BigDL 2.x by name: functions that return the equivalent PyTorch loss.

Class labels start at 0, as in PyTorch; ``NNClassifier`` shifts labels that start at 1 (see
``setZeroBasedLabel``).
"""

from bigdl.common.errors import require

__all__ = [
    "AbsCriterion",
    "BCECriterion",
    "ClassNLLCriterion",
    "CrossEntropyCriterion",
    "DistKLDivCriterion",
    "MSECriterion",
    "SmoothL1Criterion",
]


def MSECriterion(size_average: bool = True, bigdl_type: str = "float"):
    """Return ``torch.nn.MSELoss``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.criterion import MSECriterion
    >>> MSECriterion()(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    tensor(2.)
    """
    return _loss("MSELoss", size_average)


def AbsCriterion(size_average: bool = True, bigdl_type: str = "float"):
    """Return ``torch.nn.L1Loss``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.criterion import AbsCriterion
    >>> AbsCriterion()(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    tensor(1.)
    """
    return _loss("L1Loss", size_average)


def SmoothL1Criterion(size_average: bool = True, bigdl_type: str = "float"):
    """Return ``torch.nn.SmoothL1Loss``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.criterion import SmoothL1Criterion
    >>> SmoothL1Criterion()(torch.tensor([0.0]), torch.tensor([3.0]))
    tensor(2.5000)
    """
    return _loss("SmoothL1Loss", size_average)


def BCECriterion(weights=None, size_average: bool = True, bigdl_type: str = "float"):
    """Return ``torch.nn.BCELoss``, which takes probabilities.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.criterion import BCECriterion
    >>> BCECriterion()(torch.tensor([0.5]), torch.tensor([1.0]))
    tensor(0.6931)
    """
    return _loss("BCELoss", size_average, weights)


def CrossEntropyCriterion(weights=None, size_average: bool = True, bigdl_type: str = "float"):
    """Return ``torch.nn.CrossEntropyLoss``, which takes logits, with optional class weights.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.criterion import CrossEntropyCriterion
    >>> CrossEntropyCriterion()(torch.zeros(1, 2), torch.tensor([1]))
    tensor(0.6931)
    """
    return _loss("CrossEntropyLoss", size_average, weights)


def ClassNLLCriterion(
    weights=None,
    size_average: bool = True,
    logProbAsInput: bool = True,
    bigdl_type: str = "float",
):
    """Return ``torch.nn.NLLLoss``, which takes log-probabilities, or a variant for probabilities.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.criterion import ClassNLLCriterion
    >>> ClassNLLCriterion(logProbAsInput=False)(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    tensor(0.6931)
    """
    loss = _loss("NLLLoss", size_average, weights)
    return loss if logProbAsInput else _OfProbabilities(loss)


def DistKLDivCriterion(size_average: bool = True, bigdl_type: str = "float"):
    """Return ``torch.nn.KLDivLoss`` of log-probabilities, averaged over elements by default.

    Examples
    --------
    >>> import torch
    >>> from bigdl.dllib.nn.criterion import DistKLDivCriterion
    >>> halves = torch.tensor([[0.5, 0.5]])
    >>> DistKLDivCriterion(size_average=False)(torch.tensor([[0.25, 0.75]]).log(), halves)
    tensor(0.1438)
    """
    return _loss("KLDivLoss", size_average)


def _loss(name, size_average, weights=None):
    torch = require("torch", "orca")
    options = {"reduction": "mean" if size_average else "sum"}
    if weights is not None:
        options["weight"] = torch.as_tensor(weights, dtype=torch.float32)
    return getattr(torch.nn, name)(**options)


class _OfProbabilities:
    def __init__(self, loss):
        self._loss = loss
        self.reduction = loss.reduction

    def __call__(self, output, target):
        return self._loss(output.clamp_min(1e-8).log(), target.long())
