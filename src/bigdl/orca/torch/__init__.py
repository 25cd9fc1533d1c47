"""Wrappers around PyTorch's objects, which programs for BigDL 2.x make before training.

BigDL 2.x needed them to hand a model to the JVM.  Here they carry what they were given to whoever
takes a model, a loss or an optimizer.
"""

from bigdl.orca.torch.wrappers import TorchLoss, TorchModel, TorchOptim

__all__ = ["TorchLoss", "TorchModel", "TorchOptim"]
