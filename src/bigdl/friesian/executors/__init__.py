"""Executors that run operators as Spark query plans or on Arrow batches of Parquet files.

``spark`` and ``arrow`` run operators and compute the statistics that operators learn from.
``scans`` selects how the batches of a DataFrame are read.
"""
