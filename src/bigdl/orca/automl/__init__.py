"""Searches for the best configuration of a model, on Ray or on this machine."""
