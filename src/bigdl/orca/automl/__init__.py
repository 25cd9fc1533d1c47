"""Hyperparameter search for models, on Ray or on this machine."""
