"""Data for TensorFlow."""
