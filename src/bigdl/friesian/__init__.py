"""Friesian: preparing and serving the data of recommenders on Spark."""
