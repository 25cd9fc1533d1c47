"""Executors of operators: plans of Spark, Parquet files in Arrow batches.

``spark`` and ``arrow`` run operators and answer what they ask about the data; ``scans`` says where
batches of tables come from, and ``hosts`` who works on pieces of files.
"""
