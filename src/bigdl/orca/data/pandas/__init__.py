"""Functions with pandas' interface that read files into XShards of pandas frames.

``OrcaContext.pandas_read_backend`` selects the backend: ``"spark"``, which splits large files, or
``"pandas"``, whose readers run on the workers and read whole files.  Programs with
``runtime="ray"`` have no Spark, so pandas reads the files and the result is RayXShards.
"""

from bigdl.orca.data.pandas.readers import read_csv, read_json, read_parquet

__all__ = ["read_csv", "read_json", "read_parquet"]
