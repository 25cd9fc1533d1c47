"""A loader of tables for any training loop: each row once per epoch, for any number of ranks."""

from bigdl.data.loader import TableLoader

__all__ = ["TableLoader"]
