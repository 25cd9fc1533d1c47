"""Former module name of :mod:`bigdl.orca.data.lake_tables`."""

from bigdl.data.lake_tables import is_lake, is_table_object, open_table

__all__ = ["is_lake", "is_table_object", "open_table"]
