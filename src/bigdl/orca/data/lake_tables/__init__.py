"""Tables of files (:mod:`bigdl.data.lake_tables`), and as frames of pandas, Spark and Ray."""

from bigdl.data.lake_tables import is_lake, is_table_object, open_table

__all__ = ["is_lake", "is_table_object", "open_table"]
