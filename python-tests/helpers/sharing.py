"""Files that start the same costly processes are run by one process of pytest-xdist."""

import functools
import re
from collections.abc import Iterable
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

ROOT = Path(__file__).parents[2]


@functools.cache
def started_by(file: str) -> str:
    """What a file starts that takes many seconds of CPU: workers with TensorFlow, Ray, a crew.

    Spark is started by nearly all; tests on executors of their own have their place at the end.
    """
    text = (ROOT / file).read_text("utf-8")
    if "local_cluster" in text:
        return ""
    if "/orca/keras/" in file:
        return "tensorflow"
    if re.search(r"\bray_models\b|def test_.*\b(engine_)?way\b", text):
        return "ray"
    return "crew" if "shared_crew" in text else ""


def next_file(files: Iterable[str], runner: object, owners: dict[str, object]) -> str:
    """The file that a process runs next, which owns what it starts from now on."""
    files = list(files)
    owns = runner in owners.values()
    for may_run in (
        lambda kind: kind and owners.get(kind) is runner,
        lambda kind: not kind or not (owns or kind in owners),
        lambda kind: True,
    ):
        for file in files:
            kind = started_by(file)
            if may_run(kind):
                if kind:
                    owners.setdefault(kind, runner)
                return file
    raise LookupError("no file is left")


class SharingScheduling(LoadFileScheduling):
    """Whole files in their order, but those that share something costly go to one process."""

    def __init__(self, config, log=None):
        super().__init__(config, log)
        self._owners: dict[str, object] = {}

    def _assign_work_unit(self, node):
        self.workqueue.move_to_end(next_file(self.workqueue, node, self._owners), last=False)
        super()._assign_work_unit(node)
