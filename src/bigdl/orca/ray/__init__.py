"""Ray context of Orca programs, under the names of BigDL 2.x."""

from bigdl.orca.cluster.ray import OrcaRayContext

RayContext = OrcaRayContext
"""The name of BigDL 2.0."""

__all__ = ["OrcaRayContext", "RayContext"]
