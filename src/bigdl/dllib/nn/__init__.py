"""Losses and layers of BigDL 2.x by name, made of PyTorch's."""
