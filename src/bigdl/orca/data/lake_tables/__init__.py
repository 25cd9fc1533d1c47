"""Parquet, Delta Lake and Iceberg tables (:mod:`bigdl.data.lake_tables`), and their frames."""

from bigdl.data.lake_tables import is_lake, is_table_object, open_table

__all__ = ["is_lake", "is_table_object", "open_table"]
