"""Batches of a table for any training loop: each row once per epoch, on any number of ranks."""

from bigdl.data.images import ImageDecoder
from bigdl.data.loader import TableLoader

__all__ = ["ImageDecoder", "TableLoader"]
