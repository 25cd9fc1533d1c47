"""Who runs the N workers of a distributed program."""

from bigdl.orca.engine.base import Engine, Job
from bigdl.orca.engine.ray import RayEngine
from bigdl.orca.engine.spark import SparkEngine

__all__ = ["Engine", "Job", "RayEngine", "SparkEngine"]
