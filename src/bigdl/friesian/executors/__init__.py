"""Executors of operators: plans of Spark, Parquet files in Arrow batches.

``spark`` and ``arrow`` run operators and answer what they ask about the data; ``scans`` says where
the batches of tables come from.
"""
