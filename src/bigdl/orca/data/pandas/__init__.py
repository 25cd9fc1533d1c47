"""Readers like those of pandas, whose result is XShards of pandas frames.

``OrcaContext.pandas_read_backend`` says who reads the files: ``"spark"``, which cuts large ones, or
``"pandas"``, whose own readers run on the workers, each on whole files.  In a program with
``runtime="ray"`` there is no Spark: pandas reads, and the result is RayXShards.
"""

from bigdl.orca.data.pandas.readers import read_csv, read_json, read_parquet

__all__ = ["read_csv", "read_json", "read_parquet"]
