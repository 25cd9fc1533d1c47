"""Trying many methods on one model, and choosing among them.

The life of a search: :func:`~bigdl.nano.acceleration.search.candidates.choose` names the methods.
A :class:`~bigdl.nano.acceleration.search.bench.Bench`, the framework's part, holds the model and
the data. It travels once to a process of its own, in which
:func:`~bigdl.nano.acceleration.search.trial.try_method` builds one method after the other, times
each against the original in alternation, scores it and saves it; a process that hangs, crashes or
takes too much memory is replaced, and only the row of that method is lost
(:mod:`~bigdl.nano.acceleration.search.isolation`). The rows make up
:class:`~bigdl.nano.acceleration.search.results.Results`, which owns the directory of saved models.
"""

from bigdl.nano.acceleration.search.bench import Bench, Contestant
from bigdl.nano.acceleration.search.candidates import choose
from bigdl.nano.acceleration.search.results import Results
from bigdl.nano.acceleration.search.trial import Plan, Point, Trial
from bigdl.nano.acceleration.search.walk import Limits, search

__all__ = [
    "Bench",
    "Contestant",
    "Limits",
    "Plan",
    "Point",
    "Results",
    "Trial",
    "choose",
    "search",
]
