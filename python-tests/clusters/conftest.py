"""Real clusters on this machine, each started once."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from real_clusters import running


@pytest.fixture(scope="session")
def yarn(tmp_path_factory) -> Iterator[Path]:
    """The folder of a YARN of two hosts with HDFS."""
    with running("yarn.py", tmp_path_factory.mktemp("yarn")) as folder:
        yield folder
