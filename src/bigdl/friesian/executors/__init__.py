"""Executors of operators: plans of Spark, Parquet files in Arrow batches.

``spark`` and ``arrow`` run operators and answer what they ask about the data; ``files``, ``scans``
and ``hosts`` say where batches come from and who works on them.
"""
