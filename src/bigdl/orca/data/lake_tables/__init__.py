"""Parquet, Delta Lake and Iceberg tables, and their conversion to Spark, Ray and pandas frames."""

from bigdl.data.lake_tables import is_lake, is_table_object, open_table

__all__ = ["is_lake", "is_table_object", "open_table"]
