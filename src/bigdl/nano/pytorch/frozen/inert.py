"""Which modules compute the same whatever happens in training."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

__all__ = ["modes_of", "why_not_inert"]

_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
_RANDOM = (nn.modules.dropout._DropoutNd, nn.RReLU, nn.RNNBase, nn.MultiheadAttention)


def why_not_inert(module: nn.Module, name: str) -> str | None:
    """Why a module without trained parameters may not be replaced.

    Parameters
    ----------
    module : Module
    name : str
        What the user calls it.

    Returns
    -------
    str or None
        One sentence; None if it always computes the same.
    """
    for inner, part in module.named_modules(prefix=name):
        reason = _why_not(part)
        if reason:
            return f"{inner} ({type(part).__name__}) {reason}"
    return None


def _why_not(part: nn.Module) -> str | None:
    if isinstance(part, _NORMS) and (part.training or part.running_mean is None):
        if part.running_mean is None and not part.training:
            return "has no running statistics, so an image's result depends on its batch"
        if isinstance(part, nn.modules.batchnorm._BatchNorm) or part.track_running_stats:
            return "is in train mode, so its statistics follow the batches; call eval() on it"
    if not part.training:
        return None
    if isinstance(part, _RANDOM) and getattr(part, "p", getattr(part, "dropout", 1)):
        return "is in train mode, so it draws at random; call eval() on it"
    if _of_user_and_reads_mode(part):
        return "is in train mode and asks for its mode; call eval() on it"
    return None


def _of_user_and_reads_mode(part: nn.Module) -> bool:
    if type(part).__module__.startswith("torch.nn."):
        return False
    code = getattr(type(part).forward, "__code__", None)
    return code is None or "training" in code.co_names


def modes_of(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, bool]]:
    """The modules whose mode matters, and the modes that they have."""
    return [
        (part, part.training)
        for module in modules
        for part in module.modules()
        if isinstance(part, _NORMS + _RANDOM) or _of_user_and_reads_mode(part)
    ]
