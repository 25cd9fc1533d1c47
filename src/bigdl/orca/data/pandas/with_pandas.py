"""The backend "pandas": whole files, read by pandas on the workers."""

from __future__ import annotations

from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.data.pandas.paths import files_of, split_paths
from bigdl.orca.data.xshards.arrays import even_cut
from bigdl.orca.data.xshards.kinds import DATA_FRAME

__all__ = ["read"]


def read(kind: str, file_path, options: dict[str, Any]):
    """XShards of the frames of ``pandas.read_<kind>``, the files of a partition joined to one."""
    from bigdl.orca.cluster.ray import RayCluster, is_alone
    from bigdl.orca.cluster.spark import SparkCluster
    from bigdl.orca.data.xshards import SparkXShards

    on_ray = is_alone()
    files = [
        file for path in split_paths(file_path) for file in files_of(path, nested=kind == "parquet")
    ]
    cluster = RayCluster.from_active() if on_ray else SparkCluster.from_active()
    number = min(len(files), cluster.nodes * cluster.cores_per_node)
    groups = [files[low:high] for low, high in even_cut(len(files), number)]
    for option in ("iterator", "chunksize"):
        if options.get(option):
            raise UsageError(f"{option} is not possible: every shard is a whole frame")
    if on_ray:
        return _on_ray(_Reader(kind, options), groups)
    rdd = cluster.sc.parallelize(groups, number).map(_Reader(kind, options))
    return SparkXShards(rdd, class_name=None if options.get("squeeze") else DATA_FRAME)


def _on_ray(reader: _Reader, groups: list[list[str]]):
    """RayXShards of a frame for every group of files."""
    import ray

    from bigdl.orca.data.ray_xshards import RayXShards

    task = ray.remote(lambda files: [reader(files)])
    return RayXShards([task.remote(files) for files in groups])


class _Reader:
    def __init__(self, kind: str, options: dict):
        self._kind, self._options = kind, options

    def __call__(self, files: list[str]) -> Any:
        import pandas as pd

        read = getattr(pd, f"read_{self._kind}")
        options = dict(self._options)
        squeeze = options.pop("squeeze", False)  # pandas 2 took it away
        frames = []
        for file in files:
            frame = read(_prepared(file), **options)
            frames.append(frame.squeeze("columns") if squeeze else frame)
        return frames[0] if len(frames) == 1 else pd.concat(frames)


def _prepared(file: str) -> str:
    """`file`, after the driver of its storage was made ready in this process."""
    from bigdl.orca.data.file import is_local_path, open_file_system

    if not is_local_path(file):
        open_file_system(file)
    return file
