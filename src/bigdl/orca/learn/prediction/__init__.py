"""Prediction of every kind of input by tasks, with a model that was shipped to them."""
