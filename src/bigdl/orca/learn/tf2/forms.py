"""The forms of batches: what is remembered of a model's inputs, to tell it its shapes again.

A subclassed model makes its weights when it is first called.  A fit notes the form of a row of its
inputs in every snapshot (as ``example``), so that the driver can make the weights too, to put those
of the snapshot in.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bigdl.common.errors import UsageError
from bigdl.orca.learn.tf2.data import Assembly, made_up
from bigdl.orca.learn.tf2.shipping import call_on
from bigdl.orca.learn.tf2.state import array_of
from bigdl.runtime.shards.texts import TEXT

__all__ = ["first_row", "form_of", "tell_shapes", "zeros_of"]


def form_of(batch: Any) -> Any:
    """The structure, dtypes and shapes of a batch, JSON-able; see :func:`zeros_of`."""
    if batch is None:
        return None
    if isinstance(batch, dict):
        return {"dict": {name: form_of(each) for name, each in batch.items()}}
    if isinstance(batch, list | tuple):
        return {"tuple": [form_of(each) for each in batch]}
    array = array_of(batch)
    is_text = array.dtype.kind in "OSU"
    return {"dtype": f"{TEXT}1" if is_text else array.dtype.name, "shape": list(array.shape)}


def zeros_of(form: Any) -> Any:
    """A batch of zeros, or of empty texts, of a form that :func:`form_of` gave."""
    if form is None:
        return None
    if "dict" in form:
        return {name: zeros_of(each) for name, each in form["dict"].items()}
    if "tuple" in form:
        return tuple(zeros_of(each) for each in form["tuple"])
    return np.zeros(form["shape"], form["dtype"])


def tell_shapes(model, sample_input: Any, known: dict) -> Any:
    """Let a model that does not know its shapes make its weights, if anything tells them.

    Parameters
    ----------
    model : keras.Model
    sample_input : arrays or None
    known : dict
        The manifest of a snapshot.

    Returns
    -------
    arrays or None
        The row of inputs that it was called on.
    """
    if model.built:
        return None
    if sample_input is not None:
        row = first_row(sample_input)
    elif known.get("example") is not None:
        row = zeros_of(known["example"])
    elif known.get("inputs") is not None:  # of a checkpoint of earlier releases
        row = _row_of(known["inputs"])
    else:
        return None
    try:
        call_on(model, row)
    except Exception as error:  # a call of the user's own may raise anything
        text = " ".join(str(error).split())[:600]
        what = "rows of this form" if sample_input is None else "sample_input"
        raise UsageError(f"The model does not take {what}: {text}") from error
    return row


def first_row(sample_input: Any) -> Any:
    """The first row of arrays of the user's."""
    import keras

    def first(value):
        array = array_of(value)
        if not array.ndim:
            raise UsageError(
                "sample_input should be an array of rows, or a tuple or dict of such arrays, got "
                f"a {type(value).__name__} in it"
            )
        return array[:1]

    return keras.tree.map_structure(first, sample_input)


def _row_of(inputs: list) -> Any:
    *features, _ = made_up(inputs, [])
    as_arrays = [
        {k: np.asarray(v) for k, v in f.items()} if isinstance(f, dict) else np.asarray(f)
        for f in features
    ]
    return Assembly().inputs(as_arrays)
