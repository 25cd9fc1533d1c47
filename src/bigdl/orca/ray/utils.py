"""Former import path of :func:`resource_to_bytes`."""

from bigdl.orca.cluster.ray import resource_to_bytes

__all__ = ["resource_to_bytes"]
