"""Executors that come and go, as Spark's own dynamic allocation would change them."""

import time

import pytest


class Executors:
    """The executors of an application.

    Parameters
    ----------
    spark : SparkSession
        With two of them.
    """

    def __init__(self, spark):
        self.sc = spark.sparkContext._jsc.sc()

    def need_first(self):
        """Skip a test that takes executors back, if some were killed before it."""
        ids = self.sc.schedulerBackend().getExecutorIds()
        found = sorted(ids.apply(i) for i in range(ids.size()))
        if found != ["0", "1"]:
            pytest.skip(
                "Spark's master gives no more executors once some were killed; run it first"
            )

    def give_back(self):
        """One of two; without the last one, nobody would make what is lost with this one again."""
        if self.count() < 2:
            return
        ids = self.sc.schedulerBackend().getExecutorIds()
        assert self.sc.killExecutor(ids.apply(0))
        self._await(1)

    def take(self):
        """Spark lost count of those that it began with, so it is asked more than once."""
        self._await(2, lambda: self.sc.requestExecutors(1))

    def count(self):
        return self.sc.schedulerBackend().getExecutorIds().size()

    def _await(self, count, ask=lambda: None):
        end = time.monotonic() + 120
        while self.count() != count:
            assert time.monotonic() < end
            ask()
            time.sleep(0.5)
