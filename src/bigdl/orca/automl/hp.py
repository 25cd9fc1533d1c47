"""Search spaces: dicts of fixed values and of distributions, such as :func:`uniform`.

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
    """Return a space of floats, uniform from `lower` to `upper`.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"momentum": hp.uniform(0.5, 0.99), "classes": 10}  # a search space that draws one value
    {'momentum': 0.5..0.99, 'classes': 10}
    """
    return Number(lower, upper)


def quniform(lower: float, upper: float, q: float) -> Number:
    """Return a space of multiples of `q`, uniform from `lower` to `upper`, both included.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"dropout": hp.quniform(0.0, 0.5, 0.1)}  # 0.0, 0.1, 0.2, 0.3, 0.4 or 0.5
    {'dropout': 0.0..0.5, q=0.1}
    """
    return Number(lower, upper, q=q)


def loguniform(lower: float, upper: float, base: float = 10) -> Number:
    """Return a space of floats whose logarithm is uniformly distributed.

    Parameters
    ----------
    lower, upper : float
        Bounds of the value (not of its logarithm), above 0.
    base : float, default 10
        Has no effect, because the distribution is the same for every base.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"lr": hp.loguniform(1e-4, 1e-1)}  # 0.0001 to 0.001 is as likely as 0.01 to 0.1
    {'lr': log0.0001..0.1}
    """
    return Number(lower, upper, log=True)


def qloguniform(lower: float, upper: float, q: float, base: float = 10) -> Number:
    """Return a space of multiples of `q`, log-uniformly distributed; see :func:`loguniform`.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"lr": hp.qloguniform(1e-4, 1e-1, 1e-4)}
    {'lr': log0.0001..0.1, q=0.0001}
    """
    return Number(lower, upper, q=q, log=True)


def randn(mean: float = 0.0, std: float = 1.0) -> Normal:
    """Return a space of normally distributed floats.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"bias": hp.randn(mean=0.0, std=0.1)}
    {'bias': normal(0.0, 0.1)}
    """
    return Normal(mean, std)


def qrandn(mean: float, std: float, q: float) -> Normal:
    """Return a space of normally distributed floats, rounded to multiples of `q`.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"bias": hp.qrandn(mean=0.0, std=1.0, q=0.5)}  # ..., -0.5, 0.0, 0.5, ...
    {'bias': normal(0.0, 1.0), q=0.5}
    """
    return Normal(mean, std, q=q)


def randint(lower: int, upper: int) -> Number:
    """Return a space of integers, uniform from `lower` to `upper`, both included.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"layers": hp.randint(1, 3)}  # 1, 2 or 3
    {'layers': 1..3}
    """
    return Number(lower, upper, whole=True)


def qrandint(lower: int, upper: int, q: int = 1) -> Number:
    """Return a space of integer multiples of `q`, uniform from `lower` to `upper`, both included.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"units": hp.qrandint(32, 128, 32)}  # 32, 64, 96 or 128
    {'units': 32..128, q=32}
    """
    return Number(lower, upper, q=q, whole=True)


def choice(categories: Sequence) -> Choice:
    """Return a space that selects one value from a list.

    A value may contain further spaces in dicts and lists; they are drawn if the value is selected.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"optimizer": hp.choice(["Adam", "SGD"])}
    {'optimizer': one of ["'Adam'", "'SGD'"]}
    >>> space = {"net": hp.choice([{"type": "flat"}, {"type": "deep", "layers": hp.randint(1, 4)}])}
    """
    return Choice(categories)


def choice_n(categories: Sequence, min_items: int, max_items: int) -> Subset:
    """Return a space that selects `min_items` to `max_items` of the values, in list order.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"features": hp.choice_n(["age", "city", "price"], 1, 2)}  # such as ["age", "price"]
    {'features': 1..2 of ["'age'", "'city'", "'price'"]}
    """
    return Subset(categories, min_items, max_items)


def sample_from(func: Callable) -> SampleFrom:
    """Return a space whose value is computed from the other values of a configuration.

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
    >>> twice_the_units(SimpleNamespace(config=SimpleNamespace(units=32)))  # with 32 units
    64
    """
    return SampleFrom(func)


def grid_search(values: Sequence) -> GridSearch:
    """Return a grid space: the search tries each value, in all combinations with other grids.

    `n_sampling` is the number of repetitions of the whole grid.

    Examples
    --------
    >>> from bigdl.orca.automl import hp
    >>> {"lr": hp.grid_search([0.1, 0.01]), "units": hp.grid_search([32, 64])}  # four trials
    {'lr': each of ['0.1', '0.01'], 'units': each of ['32', '64']}
    """
    return GridSearch(values)
