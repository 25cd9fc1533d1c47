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
    """A float, evenly from `lower` to `upper`.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"momentum": hp.uniform(0.5, 0.99), "classes": 10}  # a search space: one value is drawn
    {'momentum': 0.5..0.99, 'classes': 10}
    """
    return Number(lower, upper)


def quniform(lower: float, upper: float, q: float) -> Number:
    """A multiple of `q`, evenly from `lower` to `upper`, both included.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"dropout": hp.quniform(0.0, 0.5, 0.1)}  # 0.0, 0.1, 0.2, 0.3, 0.4 or 0.5
    {'dropout': 0.0..0.5, q=0.1}
    """
    return Number(lower, upper, q=q)


def loguniform(lower: float, upper: float, base: float = 10) -> Number:
    """A float whose logarithm is drawn evenly.

    Parameters
    ----------
    lower, upper : float
        The bounds of the value itself, above 0.
    base : float, default 10
        Without effect: the distribution is the same for every base.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"lr": hp.loguniform(1e-4, 1e-1)}  # 0.0001 to 0.001 is as likely as 0.01 to 0.1
    {'lr': log0.0001..0.1}
    """
    return Number(lower, upper, log=True)


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> Number:
    """A multiple of `q` whose logarithm is drawn evenly; see :func:`loguniform`.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"lr": hp.qloguniform(1e-4, 1e-1, 1e-4)}
    {'lr': log0.0001..0.1, q=0.0001}
    """
    return Number(lower, upper, q=q, log=True)


def randn(mean: float = 0.0, std: float = 1.0) -> Normal:
    """A float of a normal distribution.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"bias": hp.randn(mean=0.0, std=0.1)}
    {'bias': normal(0.0, 0.1)}
    """
    return Normal(mean, std)


def qrandn(mean: float, std: float, q: float) -> Normal:
    """A multiple of `q` next to a float of a normal distribution.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"bias": hp.qrandn(mean=0.0, std=1.0, q=0.5)}  # ..., -0.5, 0.0, 0.5, ...
    {'bias': normal(0.0, 1.0), q=0.5}
    """
    return Normal(mean, std, q=q)


def randint(lower: int, upper: int) -> Number:
    """An integer, evenly from `lower` to `upper`, both included.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"layers": hp.randint(1, 3)}  # 1, 2 or 3
    {'layers': 1..3}
    """
    return Number(lower, upper, whole=True)


def qrandint(lower: int, upper: int, q: int = 1) -> Number:
    """A multiple of `q`, evenly from `lower` to `upper`, both included.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"units": hp.qrandint(32, 128, 32)}  # 32, 64, 96 or 128
    {'units': 32..128, q=32}
    """
    return Number(lower, upper, q=q, whole=True)


def choice(categories: Sequence) -> Choice:
    """One of the values of a list.

    A value may hold further spaces, in dicts and lists; they are drawn where it is chosen.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"optimizer": hp.choice(["Adam", "SGD"])}
    {'optimizer': one of ["'Adam'", "'SGD'"]}
    >>> space = {"net": hp.choice([{"kind": "flat"}, {"kind": "deep", "layers": hp.randint(1, 4)}])}
    """
    return Choice(categories)


def choice_n(categories: Sequence, min_items: int, max_items: int) -> Subset:
    """A list of at least `min_items` and at most `max_items` of the values, in their order.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"features": hp.choice_n(["age", "city", "price"], 1, 2)}  # such as ["age", "price"]
    {'features': 1..2 of ["'age'", "'city'", "'price'"]}
    """
    return Subset(categories, min_items, max_items)


def sample_from(func: Callable) -> SampleFrom:
    """A value that is computed from the others.

    Parameters
    ----------
    func : callable
        ``func(spec)``: the other values are the attributes of ``spec.config``, as in
        ``hp.sample_from(lambda spec: spec.config.units * 2)``.

    Examples
    --------
    >>> from types import SimpleNamespace
    >>> from bigdl.orca.automl import hp
    >>> def twice_the_units(spec):
    ...     return spec.config.units * 2
    >>> {"units": hp.choice([32, 64]), "hidden": hp.sample_from(twice_the_units)}
    {'units': one of ['32', '64'], 'hidden': sample_from(twice_the_units)}
    >>> twice_the_units(SimpleNamespace(config=SimpleNamespace(units=32)))  # of a trial of 32 units
    64
    """
    return SampleFrom(func)


def grid_search(values: Sequence) -> GridSearch:
    """Each of the values, in a trial of its own; with several grids, each combination.

    `n_sampling` is how often the whole grid is tried.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"lr": hp.grid_search([0.1, 0.01]), "units": hp.grid_search([32, 64])}  # four trials
    {'lr': each of ['0.1', '0.01'], 'units': each of ['32', '64']}
    """
    return GridSearch(values)
