"""Losses and layers of BigDL 2.x by name, implemented with PyTorch."""
