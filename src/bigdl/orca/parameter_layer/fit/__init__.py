"""A fit by the parameter layer: what is the same for a model of every framework.

The mechanism itself, which knows of no epochs, is :mod:`bigdl.orca.parameter_layer`.
"""
