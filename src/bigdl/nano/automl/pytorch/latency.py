"""How fast a trial's model is, as it is or in another runtime."""

from __future__ import annotations

import logging
from typing import Any

import torch

from bigdl.common.errors import UsageError, one_line
from bigdl.nano.acceleration.search.timing import block, time_alone
from bigdl.nano.pytorch.inference.optimizer import InferenceOptimizer
from bigdl.nano.pytorch.inference.source import Batch, batches_of, sample_arguments

__all__ = ["ORIGINAL", "RUNTIMES", "fastest"]

ORIGINAL = "original"
RUNTIMES = ("openvino_fp32", "onnxruntime_fp32", "jit_fp32")
"""Methods of InferenceOptimizer that are tried: all compute in float32, so accuracy stays."""

_CALLS = 20
_log = logging.getLogger(__name__)


def fastest(
    model: torch.nn.Module, trainer: Any, input_sample: Any, acceleration: bool
) -> tuple[str, float]:
    """The fastest runtime of a model, and the milliseconds that a call takes there.

    Parameters
    ----------
    model : LightningModule
        Trained; it is left in training mode if it was.
    trainer : Trainer
        Has trained it; the first batch of its validation is the sample where there is none.
    input_sample : object
        As of ``InferenceOptimizer.trace``, or None.
    acceleration : bool
        Whether to try other runtimes at all.

    Returns
    -------
    runtime : str
        ``"original"`` or a method of InferenceOptimizer.
    latency : float
        Milliseconds, the median of some calls.

    Raises
    ------
    UsageError
        If there is no sample.
    """
    batch = _sample(model, trainer, input_sample)
    was_training = model.training
    model.eval()
    try:
        latencies = {ORIGINAL: _latency(model, batch)}
        for method in RUNTIMES if acceleration else ():
            built = _built(model, method, batch)
            if built is not None:
                latencies[method] = _latency(built, batch)
    finally:
        model.train(was_training)
    best = min(latencies, key=latencies.__getitem__)
    return best, latencies[best]


def _sample(model: torch.nn.Module, trainer: Any, input_sample: Any) -> Batch:
    if input_sample is not None:
        return Batch(*sample_arguments(model, input_sample))
    loaders = trainer.val_dataloaders or trainer.train_dataloader
    loader = loaders[0] if isinstance(loaders, (list, tuple)) else loaders
    batch = None if loader is None else next(batches_of(model, loader), None)
    if batch is None:
        raise UsageError(
            "The latency of a model is measured with a sample of its input; pass input_sample"
        )
    return batch


def _built(model: torch.nn.Module, method: str, batch: Batch) -> torch.nn.Module | None:
    sample = batch.kwargs or (batch.args[0] if len(batch.args) == 1 else batch.args)
    # TorchScript looks at all properties, and a copy of a LightningModule has no trainer.
    model._jit_is_scripting = True
    try:
        return InferenceOptimizer.build(model, method, input_sample=sample)
    except Exception as error:  # a runtime that is missing, or does not know an operation
        _log.warning("%s is left out: %s", method, one_line(error))
        return None
    finally:
        del model._jit_is_scripting


def _latency(model: torch.nn.Module, batch: Batch) -> float:
    with InferenceOptimizer.get_context(model), torch.inference_mode():
        timed = block(lambda number: model(*batch.args, **batch.kwargs))
        return time_alone(timed, _CALLS).latency
