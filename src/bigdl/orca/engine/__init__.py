"""Who runs the N workers of a distributed program."""

from bigdl.orca.engines.ray import RayEngine
from bigdl.orca.engines.spark import SparkEngine
from bigdl.runtime.engine import Engine
from bigdl.runtime.jobs import Job
from bigdl.runtime.local import LocalEngine

__all__ = ["Engine", "Job", "LocalEngine", "RayEngine", "SparkEngine"]
