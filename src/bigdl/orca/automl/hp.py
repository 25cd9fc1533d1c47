"""Search spaces: a dict whose values are made here, or are fixed.

>>> from bigdl.orca.automl import hp
>>> space = {"lr": hp.loguniform(1e-4, 1e-1), "units": hp.choice([32, 64]), "classes": 10}
"""

from collections.abc import Callable, Sequence

from bigdl.tuning.spaces import Choice, GridSearch, Normal, Number, SampleFrom, Subset

__all__ = [
    "choice",
    "choice_n",
    "grid_search",
    "loguniform",
    "qloguniform",
    "qrandint",
    "qrandn",
    "quniform",
    "randint",
    "randn",
    "sample_from",
    "uniform",
]


def uniform(lower: float, upper: float) -> Number:
    """A float, evenly from `lower` to `upper`."""
    return Number(lower, upper)


def quniform(lower: float, upper: float, q: float) -> Number:
    """A multiple of `q`, evenly from `lower` to `upper`, both included."""
    return Number(lower, upper, q=q)


def loguniform(lower: float, upper: float, base: float = 10) -> Number:
    """A float whose logarithm is drawn evenly.

    Parameters
    ----------
    lower, upper : float
        The bounds of the value itself, above 0.
    base : float, default 10
        Without effect: the distribution is the same for every base.
    """
    return Number(lower, upper, log=True)


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> Number:
    """A multiple of `q` whose logarithm is drawn evenly; see :func:`loguniform`."""
    return Number(lower, upper, q=q, log=True)


def randn(mean: float = 0.0, std: float = 1.0) -> Normal:
    """A float of a normal distribution."""
    return Normal(mean, std)


def qrandn(mean: float, std: float, q: float) -> Normal:
    """A multiple of `q` next to a float of a normal distribution."""
    return Normal(mean, std, q=q)


def randint(lower: int, upper: int) -> Number:
    """An integer, evenly from `lower` to `upper`, both included."""
    return Number(lower, upper, whole=True)


def qrandint(lower: int, upper: int, q: int = 1) -> Number:
    """A multiple of `q`, evenly from `lower` to `upper`, both included."""
    return Number(lower, upper, q=q, whole=True)


def choice(categories: Sequence) -> Choice:
    """One of the values of a list."""
    return Choice(categories)


def choice_n(categories: Sequence, min_items: int, max_items: int) -> Subset:
    """A list of at least `min_items` and at most `max_items` of the values, in their order."""
    return Subset(categories, min_items, max_items)


def sample_from(func: Callable) -> SampleFrom:
    """A value that is computed from the others.

    Parameters
    ----------
    func : callable
        ``func(spec)``: the other values are the attributes of ``spec.config``, as in
        ``hp.sample_from(lambda spec: spec.config.units * 2)``.
    """
    return SampleFrom(func)


def grid_search(values: Sequence) -> GridSearch:
    """Each of the values, in a trial of its own; with several grids, each combination.

    `n_sampling` is how often the whole grid is tried.
    """
    return GridSearch(values)
