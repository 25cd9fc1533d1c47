"""The name ``TrainingOperator`` of BigDL 2.0."""

from __future__ import annotations

from bigdl.common.errors import UsageError

__all__ = ["TrainingOperator", "check_operator"]


class TrainingOperator:
    """The training step of BigDL 2.0; accepted as it is.

    A step of one's own is a :class:`~bigdl.orca.learn.pytorch.callbacks.MainCallback`:
    ``forward_batch`` became ``on_iter_forward``, ``train_batch`` that and ``on_iter_backward``, and
    ``predict_batch`` became ``on_pred_forward``.
    """


def check_operator(operator) -> None:
    """Refuse an operator that does something of its own."""
    if operator is None or operator is TrainingOperator:
        return
    name = getattr(operator, "__name__", type(operator).__name__)
    raise UsageError(
        f"training_operator_cls={name} cannot be used; make its forward_batch the on_iter_forward "
        "of a MainCallback (its train_batch that and on_iter_backward) and pass it as callbacks=["
        "...] to fit and evaluate"
    )
