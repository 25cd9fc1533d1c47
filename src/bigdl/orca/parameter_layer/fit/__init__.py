"""Framework-independent modules for training with the parameter layer.

The underlying mechanism, which has no epochs, is :mod:`bigdl.orca.parameter_layer`.
"""
