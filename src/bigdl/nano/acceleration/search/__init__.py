"""A search for the best method for one model.

The life of a search: :func:`~bigdl.nano.acceleration.search.results.choose` names the methods.
A :class:`~bigdl.nano.acceleration.search.trial.Bench`, the framework's part, holds the model and
the data. It is pickled once to a process of its own, in which
:func:`~bigdl.nano.acceleration.search.trial.try_method` builds one method after the other, times
each against the original in alternation, scores it and saves it; a process that hangs, crashes or
takes too much memory is replaced, and only the row of that method is lost
(:mod:`~bigdl.nano.acceleration.search.isolation`). The rows make up
:class:`~bigdl.nano.acceleration.search.results.Results`, which owns the directory of saved models.
"""
