"""Torch scheduler that computes the learning rate from the number of updates."""

from torch.optim.lr_scheduler import LRScheduler


class ByFormula(LRScheduler):
    """A scheduler that sets the learning rate of update n to ``rate(initial rate, n)``.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
    rate : callable
    """

    # : step the scheduler after every update
    interval = "step"

    def __init__(self, optimizer, rate):
        self._rate = rate
        super().__init__(optimizer)

    def get_lr(self):
        return [self._rate(base, self.last_epoch) for base in self.base_lrs]

    def state_dict(self):
        return {k: v for k, v in super().state_dict().items() if k != "_rate"}
