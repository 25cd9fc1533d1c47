"""Executors that come and go, as Spark's own dynamic allocation would change them."""

import time


class Executors:
    """The executors of an application.

    Parameters
    ----------
    spark : SparkSession
        With two of them.
    """

    def __init__(self, spark):
        self.sc = spark.sparkContext._jsc.sc()

    def give_back(self):
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
