"""Arguments of the Estimator's verbs, looked at before anything runs."""

from __future__ import annotations

from bigdl.common.checks import check_positive
from bigdl.common.errors import UsageError
from bigdl.orca.learn.pytorch.callbacks import MainCallback, TqdmCallback
from bigdl.training.progress import is_interactive

__all__ = [
    "check_accumulation",
    "check_not_accelerated",
    "measures_of",
    "shows_progress",
    "takes_over_prediction",
]


def measures_of(metrics) -> tuple[list, list[str]]:
    """Metrics as a list of its own, and their names."""
    from bigdl.orca.learn.metrics import Metric

    given = [] if metrics is None else metrics
    measures = list(given) if isinstance(given, list | tuple) else [given]
    return measures, list(Metric.convert_metrics_dict(measures, backend="pytorch"))


def check_accumulation(batches, callbacks) -> int:
    """``accumulate_grad_batches``, which a step of the user's own would not do."""
    batches = check_positive("accumulate_grad_batches", batches)
    if batches > 1 and any(isinstance(c, MainCallback) and c.owns_backward for c in callbacks):
        raise UsageError(
            f"accumulate_grad_batches={batches} does not go with an on_iter_backward of one's own; "
            "accumulate there, or leave on_iter_backward as it is"
        )
    return batches


def shows_progress(callbacks) -> bool:
    """Whether a bar is shown without being asked for, or by a callback."""
    return is_interactive() or any(isinstance(c, TqdmCallback) for c in callbacks)


def takes_over_prediction(callbacks) -> bool:
    """Whether ``callbacks=`` of predict makes the outputs."""
    if not callbacks:
        return False
    given = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    if not all(isinstance(c, MainCallback) for c in given):
        raise UsageError(
            "predict calls no callbacks but the on_pred_forward of a MainCallback; let that or the "
            "model's forward return what you want"
        )
    return True


def check_not_accelerated(accelerate) -> None:
    """``accelerate=`` of predict, beside a callback that makes the outputs."""
    if accelerate is not None:
        raise UsageError(
            f"accelerate={accelerate!r} does not go with an on_pred_forward of one's own, which "
            "calls the model as it is; leave one of them out"
        )
