"""Accelerated inference of Keras models."""
