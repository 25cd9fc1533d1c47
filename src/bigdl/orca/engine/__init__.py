"""Public names of the engines; they are defined in ``orca.engines`` and ``runtime``."""

from bigdl.orca.engines.connect import ConnectEngine
from bigdl.orca.engines.ray import RayEngine
from bigdl.orca.engines.spark import SparkEngine
from bigdl.runtime.engine import Engine
from bigdl.runtime.jobs import Job
from bigdl.runtime.local import LocalEngine

__all__ = ["ConnectEngine", "Engine", "Job", "LocalEngine", "RayEngine", "SparkEngine"]
