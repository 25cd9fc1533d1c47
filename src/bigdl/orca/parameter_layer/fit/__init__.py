"""Fits by the parameter layer: the parts that are common to all frameworks.

The underlying mechanism, which has no epochs, is :mod:`bigdl.orca.parameter_layer`.
"""
