"""Accelerated models for prediction, chosen and verified on a sample of the rows."""

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
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from bigdl.common.errors import UsageError
from bigdl.common.trust import UntrustedFileError, digest_of, untrusted
from bigdl.nano.acceleration.accuracy import relative_error
from bigdl.nano.acceleration.structure import flatten
from bigdl.orca.inference.runtimes import accelerated_model, nano_files, saved_files
from bigdl.orca.learn.prediction.sample import Sample
from bigdl.orca.learn.pytorch.forward import accepted_inputs, call_model
from bigdl.orca.learn.pytorch.prediction import LoadedTorchModel, TorchSnapshot
from bigdl.training.progress import say_phase

if TYPE_CHECKING:
    from bigdl.common.types import Tensors

T = TypeVar("T")

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
"""Methods that ``accelerate="auto"`` tries: their directories contain the complete model."""
LARGEST_ERROR = 0.05
"""Largest relative error of accelerated outputs, ``|accelerated - original| / |original|``, as
Euclidean norms over the sample. ``"auto"`` rejects larger errors; other methods log a warning."""
_TIMED_CALLS = 20
_COMPARED_ROWS = 64  # calibration uses more


def _dtypes_of(value: object) -> tuple:
    """Return the dtypes of the tensors in a nested value, in order."""
    return tuple(getattr(leaf, "dtype", None) for leaf in flatten(value)[0])


def _in_dtypes(value: T, dtypes: Sequence[Any]) -> T:
    """Cast the tensors of a nested value to `dtypes`; return it unchanged if `dtypes` is empty."""
    if not dtypes or _dtypes_of(value) == tuple(dtypes):
        return value
    leaves, structure = flatten(value)
    if len(leaves) != len(dtypes):
        return value
    casts = zip(leaves, dtypes, strict=True)
    return structure.rebuild([torch.as_tensor(leaf).to(dtype) for leaf, dtype in casts])


@dataclass(frozen=True)
class AcceleratedTorchModel(LoadedTorchModel):
    """Model converted to another runtime, which tasks run instead of the Estimator's model.

    Attributes
    ----------
    takes, returns : tuple of torch.dtype
        Dtypes of the original model's inputs and outputs.
    """

    takes: tuple = ()
    returns: tuple = ()

    def outputs(self, columns: list) -> Tensors:
        return _in_dtypes(super().outputs(_in_dtypes(columns, self.takes)), self.returns)


@dataclass(frozen=True)
class AcceleratedSnapshot:
    """Files of an accelerated model, shipped to tasks in place of a :class:`TorchSnapshot`.

    Attributes
    ----------
    files : dict of str to bytes
        Files of the directory that ``InferenceOptimizer.save`` wrote.
    threads : int
        Number of threads per model in a task.
    original : TorchSnapshot, optional
        The original model, required if the files contain weights only.
    sample : tuple, optional
        Arguments of the original model, required if the files contain weights in another precision.
    takes, returns : tuple of torch.dtype
        Dtypes of the original's inputs and outputs, which a runtime may change.
    trust : bool
        Whether code in the files may run without this user's signature.
    """

    files: dict[str, bytes]
    threads: int
    original: TorchSnapshot | None = None
    sample: tuple | None = None
    takes: tuple = ()
    returns: tuple = ()
    trust: bool = True

    def load_on(self, device: torch.device | None) -> LoadedTorchModel:
        """Load the accelerated model on the CPU; `device` is ignored."""
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
        return AcceleratedTorchModel(
            model.eval(), cpu, "fp32", takes=self.takes, returns=self.returns
        )


class Acceleration:
    """Conversion of a model to a faster runtime for prediction tasks.

    Parameters
    ----------
    accelerate : str or path
        A method name, ``"auto"``, or a directory that ``InferenceOptimizer.save`` wrote.
    sample : Sample
        Rows for conversion, calibration, timing and comparison.
    batch_size, threads : int
        Batch size and number of threads of prediction.

    Raises
    ------
    UsageError
        If the method or directory does not exist.

    Attributes
    ----------
    origin : tuple
        Values that identify the acceleration, in addition to those of the model.
    """

    def __init__(
        self, accelerate: str | os.PathLike | None, sample: Sample, batch_size: int, threads: int
    ):
        self._name, self._sample = str(accelerate), sample
        self._batch_size, self._threads = batch_size, threads
        directory = _directory_of(accelerate)
        self._files = files = None if directory is None else nano_files(directory)
        what = self._name if files is None else digest_of(pickle.dumps(sorted(files.items())))
        self.origin = what, repr(sample.leaves), threads

    def of(self, snapshot: TorchSnapshot) -> TorchSnapshot | AcceleratedSnapshot:
        """Return the accelerated model, or the snapshot itself if ``"auto"`` is not faster.

        Raises
        ------
        UsageError
            If a package is missing, or the model cannot be converted.
        """
        from bigdl.common.cpu import thread_scope
        from bigdl.training.state import isolated_rng

        batches, threads = self._sample.batches(self._batch_size), self._threads
        # graphs are compiled for the current number of threads
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
                say_phase(f"converting the model, accelerate={self._name!r}")
                files = _accelerated_files(self._name, model, batches, compared, expected, threads)
            if files is None:
                return snapshot
            takes = _dtypes_of(batches[0])
            is_ours = self._files is None
            saved = AcceleratedSnapshot(files, threads, takes=takes, returns=returns, trust=is_ours)
            try:
                loaded = saved.load_on(None)
            except UntrustedFileError:
                advice = "load it with InferenceOptimizer.load(…, trust=True) and save it again"
                raise untrusted(self._name, "a saved PyTorch graph", advice) from None
            except UsageError:  # the files alone do not contain the model
                saved = replace(saved, original=snapshot, sample=batches[0])
                loaded = saved.load_on(None)
            _check(self._name, _outputs(loaded.model, compared), expected)
        return replace(saved, trust=True)  # already verified here; users of tasks have other keys


def _directory_of(accelerate: object) -> Path | None:
    """Return `accelerate` as a directory path, or None if it is a method name."""
    from bigdl.nano.pytorch.inference.methods import METHODS

    names = ["auto", *METHODS]
    if isinstance(accelerate, str) and accelerate in names:
        return None
    if isinstance(accelerate, str | os.PathLike) and os.path.isdir(accelerate):
        return Path(accelerate)
    close = difflib.get_close_matches(str(accelerate), names, 1)
    raise UsageError(
        'accelerate should be "auto", a method name, or a directory that '
        f"InferenceOptimizer.save wrote, got {accelerate!r}; "
        + (f"did you mean {close[0]!r}?" if close else f"the methods are {', '.join(names[1:])}"),
        code="name-unknown",
        argument="accelerate",
        allowed=names,
    )


def _accelerated_files(
    method: str, model, batches, compared, expected, threads
) -> dict[str, bytes] | None:
    """Return the accelerated model's files, or None if no method is faster than the original."""
    if method == "auto":
        accelerated = _fastest(model, batches, compared, expected, threads)
    else:
        accelerated = accelerated_model(model, method, batches, threads)
    return None if accelerated is model else saved_files(accelerated)


def _fastest(model, batches, compared, expected, threads):
    """Return the fastest accelerated model within the error limit, or the original model."""
    from bigdl.nano.pytorch import InferenceOptimizer

    optimizer = InferenceOptimizer()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        optimizer.optimize(
            model,
            training_data=batches,
            validation_data=compared,
            input_sample=batches[0],
            metric=functools.partial(_accuracy, expected),
            thread_num=threads,
            includes=AUTO_METHODS,
            latency_sample_num=_TIMED_CALLS,
        )
        best, option = optimizer.get_best_model(accuracy_criterion=LARGEST_ERROR)
    logger.info("accelerate='auto' chose %s\n%s", option, printed.getvalue())
    return best


def _accuracy(expected: list, model: object, data: object) -> float:
    """Return 1 minus the relative error of a model's outputs."""
    return 1.0 - relative_error(expected, _outputs(model, data))


def _outputs(model, batches) -> list:
    """Run the model on all batches and return its outputs as a flat list of arrays."""
    with torch.no_grad():
        results = [flatten(model(*batch))[0] for batch in batches]
    return [torch.as_tensor(leaf).float().numpy() for leaves in results for leaf in leaves]


def _check(accelerate, outputs, expected) -> None:
    """Raise an error if the outputs' shapes differ; warn if their relative error is large."""
    if [each.shape for each in outputs] != [each.shape for each in expected]:
        actual, wanted = (
            ", ".join(str(each.shape) for each in arrays[:4]) for arrays in (outputs, expected)
        )
        raise UsageError(
            f"accelerate={accelerate!r} is a different model than the Estimator's: for the same "
            f"rows its outputs have the shapes {actual} instead of {wanted}",
            code="model-mismatch",
            method=accelerate,
        )
    error = relative_error(expected, outputs)
    logger.info("accelerate=%r: relative error of the outputs %.2g", accelerate, error)
    if error > LARGEST_ERROR:
        logger.warning(
            "accelerate=%r: on a sample, the outputs differ from those of the original model by "
            "%.1f %%; use a method with higher precision if that is too much",
            accelerate,
            100 * error,
        )
