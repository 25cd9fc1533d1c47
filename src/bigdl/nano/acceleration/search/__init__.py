"""Search for the fastest acceleration method of a model.

Steps of a search: :func:`~bigdl.nano.acceleration.search.results.choose` selects the methods.
A :class:`~bigdl.nano.acceleration.search.trial.Bench`, implemented by each framework, holds the
model and the data. It is pickled once to a separate process, in which
:func:`~bigdl.nano.acceleration.search.trial.try_method` builds each method's model, times it in
alternation with the original, scores it and saves it. A process that hangs, crashes or takes too
much memory is replaced, and only that method's row is lost
(:mod:`~bigdl.nano.acceleration.search.isolation`). The rows form
:class:`~bigdl.nano.acceleration.search.results.Results`, which owns the directory of saved models.
"""
