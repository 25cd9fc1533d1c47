"""Datasets for TensorFlow."""
