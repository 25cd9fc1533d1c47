"""Models that predict in another runtime, chosen and checked on a sample of the rows."""

from __future__ import annotations

import contextlib
import difflib
import functools
import io
import logging
import os
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bigdl.common.errors import UsageError
from bigdl.common.trust import UntrustedFileError, digest_of, untrusted
from bigdl.nano.acceleration.accuracy import relative_error
from bigdl.nano.acceleration.structure import flatten
from bigdl.orca.inference.runtimes import accelerated_model, nano_files, saved_files
from bigdl.orca.learn.prediction.sample import Sample
from bigdl.orca.learn.pytorch.forward import accepted_inputs, call_model
from bigdl.orca.learn.pytorch.prediction import LoadedTorchModel, TorchSnapshot

logger = logging.getLogger("bigdl.orca")

AUTO_METHODS = (
    "openvino_fp32",
    "openvino_bf16",
    "openvino_int8",
    "onnxruntime_fp32",
    "onnxruntime_int8_qlinear",
    "inductor_fp32",
    "inductor_bf16",
)
"""What ``accelerate="auto"`` tries: methods whose directories hold all of the model."""
LARGEST_ERROR = 0.05
"""By how much outputs may differ from the model's own: ``|accelerated - own| / |own|``, Euclidean
over the whole sample. ``"auto"`` chooses nothing worse, other methods are warned of."""
_TIMED_CALLS = 20
_COMPARED_ROWS = 64  # calibration wants more


def _dtypes_of(value: Any) -> tuple:
    """Return the dtypes of the tensors in a nested value, in order."""
    return tuple(getattr(leaf, "dtype", None) for leaf in flatten(value)[0])


def _in_dtypes(value: Any, dtypes: Sequence[Any]) -> Any:
    """Return a nested value whose tensors have these dtypes; as it is if there are none."""
    if not dtypes or _dtypes_of(value) == tuple(dtypes):
        return value
    leaves, structure = flatten(value)
    if len(leaves) != len(dtypes):
        return value
    casts = zip(leaves, dtypes, strict=True)
    return structure.rebuild([torch.as_tensor(leaf).to(dtype) for leaf, dtype in casts])


@dataclass(frozen=True)
class AcceleratedReady(LoadedTorchModel):
    """A model of another runtime that stands for an Estimator's own.

    Attributes
    ----------
    takes, returns : tuple of torch.dtype
        Of the inputs and outputs of the Estimator's own.
    """

    takes: tuple = ()
    returns: tuple = ()

    def outputs(self, columns: list) -> Any:
        return _in_dtypes(super().outputs(_in_dtypes(columns, self.takes)), self.returns)


@dataclass(frozen=True)
class AcceleratedSnapshot:
    """Files of an accelerated model, shipped to the tasks in place of a :class:`TorchSnapshot`.

    Attributes
    ----------
    files : dict of str to bytes
        Of the directory that ``InferenceOptimizer.save`` wrote.
    threads : int
        Of the model in a task.
    original : TorchSnapshot, optional
        Where the directory holds weights only.
    sample : tuple, optional
        Arguments of the original, where the directory holds weights of another precision.
    takes, returns : tuple of torch.dtype
        Of the original's inputs and outputs, which a runtime may change.
    trust : bool
        Whether code in the files may run without the signature of this user.
    """

    files: dict[str, bytes]
    threads: int
    original: TorchSnapshot | None = None
    sample: tuple | None = None
    takes: tuple = ()
    returns: tuple = ()
    trust: bool = True

    def load_on(self, device: torch.device | None) -> LoadedTorchModel:
        """The model; it computes on the CPU wherever it is."""
        from bigdl.nano.pytorch import InferenceOptimizer

        cpu = torch.device("cpu")
        original = None if self.original is None else self.original.load_on(cpu).model
        files = {name: io.BytesIO(content) for name, content in self.files.items()}
        model = InferenceOptimizer.load(
            files,
            original,
            input_sample=self.sample,
            thread_num=self.threads,
            trust=self.trust,
        )
        return AcceleratedReady(model.eval(), cpu, "fp32", takes=self.takes, returns=self.returns)


class Acceleration:
    """A way to make a model faster in the tasks that predict.

    Parameters
    ----------
    accelerate : str or path
        A method's name, ``"auto"``, or a directory that ``InferenceOptimizer.save`` wrote.
    sample : Sample
        Rows to convert, calibrate, time and compare with.
    batch_size, threads : int
        Of prediction.

    Raises
    ------
    UsageError
        If there is no such method or directory.

    Attributes
    ----------
    origin : tuple
        What the accelerated model is made of, besides the model.
    """

    def __init__(self, accelerate: Any, sample: Sample, batch_size: int, threads: int):
        self._name, self._sample = str(accelerate), sample
        self._batch_size, self._threads = batch_size, threads
        directory = _directory_of(accelerate)
        self._files = files = None if directory is None else nano_files(directory)
        what = self._name if files is None else digest_of(pickle.dumps(sorted(files.items())))
        self.origin = what, repr(sample.leaves), threads

    def of(self, snapshot: TorchSnapshot) -> TorchSnapshot | AcceleratedSnapshot:
        """Return the accelerated model, or the model itself if ``"auto"`` finds nothing faster.

        Raises
        ------
        UsageError
            If a package is missing, or the model cannot be converted.
        """
        from bigdl.common.cpu import thread_scope
        from bigdl.training.state import isolated_rng

        batches, threads = self._sample.batches(self._batch_size), self._threads
        # graphs are compiled for the number of threads that there is now
        with thread_scope(threads):
            with isolated_rng(0):
                model = snapshot.load_on(torch.device("cpu")).model
            with torch.no_grad():
                returns = _dtypes_of(call_model(model, batches[0]))
            batches = [tuple(accepted_inputs(model, batch)) for batch in batches]
            compared = batches[: -(-_COMPARED_ROWS // max(self._batch_size, 2))]
            expected = _outputs(model, compared)
            files = self._files
            if files is None:
                files = _saved(self._name, model, batches, compared, expected, threads)
            if files is None:
                return snapshot
            takes = _dtypes_of(batches[0])
            is_ours = self._files is None
            saved = AcceleratedSnapshot(files, threads, takes=takes, returns=returns, trust=is_ours)
            try:
                loaded = saved.load_on(None)
            except UntrustedFileError:
                advice = "load it by InferenceOptimizer.load(…, trust=True) and save it again"
                raise untrusted(self._name, "a saved graph of PyTorch", advice) from None
            except UsageError:  # the files alone make no model
                saved = replace(saved, original=snapshot, sample=batches[0])
                loaded = saved.load_on(None)
            _check(self._name, _outputs(loaded.model, compared), expected)
        return replace(saved, trust=True)  # it is read as it was here, by users with other keys


def _directory_of(accelerate: Any) -> Path | None:
    """The directory, or None for the name of a method."""
    from bigdl.nano.pytorch.inference.methods import METHODS

    names = ["auto", *METHODS]
    if isinstance(accelerate, str) and accelerate in names:
        return None
    if isinstance(accelerate, str | os.PathLike) and os.path.isdir(accelerate):
        return Path(accelerate)
    close = difflib.get_close_matches(str(accelerate), names, 1)
    raise UsageError(
        'accelerate should be "auto", the name of a method, or a directory that '
        f"InferenceOptimizer.save wrote, got {accelerate!r}; "
        + (f"did you mean {close[0]!r}?" if close else f"the methods are {', '.join(names[1:])}"),
        code="name-unknown",
        argument="accelerate",
        allowed=names,
    )


def _saved(method: str, model, batches, compared, expected, threads) -> dict[str, bytes] | None:
    """The files of the accelerated model; None if it is the model itself."""
    if method == "auto":
        accelerated = _fastest(model, batches, compared, expected, threads)
    else:
        accelerated = accelerated_model(model, method, batches, threads)
    return None if accelerated is model else saved_files(accelerated)


def _fastest(model, batches, compared, expected, threads):
    """The fastest of the methods that agree with the model, or the model itself."""
    from bigdl.nano.pytorch import InferenceOptimizer

    optimizer = InferenceOptimizer()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        optimizer.optimize(
            model,
            training_data=batches,
            validation_data=compared,
            input_sample=batches[0],
            metric=functools.partial(_agreement, expected),
            thread_num=threads,
            includes=AUTO_METHODS,
            latency_sample_num=_TIMED_CALLS,
        )
        best, option = optimizer.get_best_model(accuracy_criterion=LARGEST_ERROR)
    logger.info("accelerate='auto' chose %s\n%s", option, printed.getvalue())
    return best


def _agreement(expected: list, model: Any, data: Any) -> float:
    """1 minus the relative error of a model's outputs: 1.0 for the original."""
    return 1.0 - relative_error(expected, _outputs(model, data))


def _outputs(model, batches) -> list:
    """All outputs for all batches, as one flat list of arrays."""
    with torch.no_grad():
        results = [flatten(model(*batch))[0] for batch in batches]
    return [torch.as_tensor(leaf).float().numpy() for leaves in results for leaf in leaves]


def _check(accelerate, outputs, expected) -> None:
    """Say so where the outputs are far from the model's own."""
    if [each.shape for each in outputs] != [each.shape for each in expected]:
        made, wanted = (
            ", ".join(str(each.shape) for each in arrays[:4]) for arrays in (outputs, expected)
        )
        raise UsageError(
            f"accelerate={accelerate!r} is another model than the Estimator's: of the same "
            f"rows it makes outputs of shapes {made} instead of {wanted}",
            code="model-mismatch",
            method=accelerate,
        )
    error = relative_error(expected, outputs)
    logger.info("accelerate=%r: relative error of the outputs %.2g", accelerate, error)
    if error > LARGEST_ERROR:
        logger.warning(
            "accelerate=%r: on a sample the outputs differ from those of the Estimator's own model "
            "by %.1f %%; use a method of higher precision if that is too much",
            accelerate,
            100 * error,
        )
