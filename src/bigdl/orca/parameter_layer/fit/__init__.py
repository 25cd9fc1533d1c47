"""Framework-independent modules of fits by the parameter layer.

The underlying mechanism, which has no epochs, is :mod:`bigdl.orca.parameter_layer`.
"""
