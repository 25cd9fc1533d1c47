"""Searching the hyper-parameters of Keras models."""
