"""Prediction by an accelerated form of the Estimator's model.

The model is made faster once, on the driver, by a method of Nano and with a sample of the rows.
What the tasks get is the content of the directory that ``InferenceOptimizer.save`` writes, and a
Python worker makes a model of it once, with as many threads as Spark gives to a task.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import logging
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.orca.inference.runtimes import nano_files
from bigdl.orca.learn.prediction.shipping import Shipped, digest_of
from bigdl.orca.learn.pytorch.sampling import SAMPLE_ROWS, Sample
from bigdl.orca.learn.pytorch.shipping import TorchReady, TorchSnapshot

__all__ = ["AUTO_METHODS", "LARGEST_ERROR", "Saved", "ship_accelerated"]

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


@dataclass(frozen=True)
class Saved:
    """A saved model on its way to the tasks, in place of a :class:`TorchSnapshot`.

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
    """

    files: dict[str, bytes]
    threads: int
    original: TorchSnapshot | None = None
    sample: tuple | None = None

    def ready(self, device) -> TorchReady:
        """The model; it computes on the CPU wherever it is."""
        import torch

        from bigdl.nano.pytorch import InferenceOptimizer

        cpu = torch.device("cpu")
        original = None if self.original is None else self.original.ready(cpu).model
        files = {name: io.BytesIO(content) for name, content in self.files.items()}
        model = InferenceOptimizer.load(
            files, original, input_sample=self.sample, thread_num=self.threads
        )
        return TorchReady(model.eval(), cpu, "fp32")


def ship_accelerated(
    accelerate: Any,
    sample: Sample,
    parts,
    weights: bytes,
    *,
    precision: str,
    batch_size: int,
    threads: int,
    sc,
    previous: Shipped | None = None,
) -> Shipped:
    """Make a model faster and broadcast it, unless it is what was broadcast last.

    Parameters
    ----------
    accelerate : str or path
        A method's name, ``"auto"``, or a directory that ``InferenceOptimizer.save`` wrote.
    sample : Sample
        Rows to convert, calibrate, time and compare with.
    parts : ModelParts
    weights : bytes
        State dict of the model.
    precision : str
        Of the model itself, which ``"auto"`` may choose.
    batch_size, threads : int
        Of prediction.
    sc : pyspark.SparkContext
    previous : Shipped, optional

    Returns
    -------
    Shipped

    Raises
    ------
    UsageError
        If there is no such method or directory, a package is missing, or the model cannot be
        converted.
    """
    directory = _directory_of(accelerate)
    files = nano_files(directory) if directory is not None else None
    what = str(accelerate) if files is None else _digest_of_files(files)
    origin = (parts, digest_of(weights), what, sample.kind, threads)
    if previous is not None and previous.is_of(sc, *origin):
        return previous
    from bigdl.common.cpu import thread_scope

    snapshot = TorchSnapshot.of(parts, weights, precision)
    batches = sample.batches(batch_size)
    # graphs are compiled for the number of threads that there is now
    with thread_scope(threads):
        model = _original(snapshot)
        compared = batches[: -(-_COMPARED_ROWS // max(batch_size, 2))]
        expected = _outputs(model, compared)
        if files is None:
            files = _saved(accelerate, model, batches, compared, expected, threads)
        if files is None:
            return Shipped(snapshot, sc, origin)
        saved, loaded = _complete(files, threads, snapshot, batches[0])
        _check(accelerate, _outputs(loaded.model, compared), expected)
    return Shipped(saved, sc, origin)


def _directory_of(accelerate: Any) -> Path | None:
    """The directory, or None for the name of a method."""
    from bigdl.nano.pytorch.methods import METHODS

    known = ["auto", *METHODS]
    if isinstance(accelerate, str) and accelerate in known:
        return None
    if isinstance(accelerate, str | os.PathLike) and os.path.isdir(accelerate):
        return Path(accelerate)
    close = difflib.get_close_matches(str(accelerate), known, 1)
    raise UsageError(
        'accelerate should be "auto", the name of a method, or a directory that '
        f"InferenceOptimizer.save wrote, got {accelerate!r}; "
        + (f"did you mean {close[0]!r}?" if close else f"the methods are {', '.join(known[1:])}")
    )


def _digest_of_files(files: dict[str, bytes]) -> str:
    pieces = ((f"{name} {len(files[name])} ".encode(), files[name]) for name in sorted(files))
    return digest_of(*(each for piece in pieces for each in piece))


def _original(snapshot: TorchSnapshot):
    import torch

    from bigdl.training.state import isolated_rng

    with isolated_rng(0):
        return snapshot.ready(torch.device("cpu")).model


def _saved(method: str, model, batches, compared, expected, threads) -> dict[str, bytes] | None:
    """The files of the accelerated model; None if it is the model itself."""
    from bigdl.nano.pytorch import InferenceOptimizer

    found = (
        _fastest(model, batches, compared, expected, threads)
        if method == "auto"
        else _built(method, model, batches, threads)
    )
    if found is model:
        return None
    with tempfile.TemporaryDirectory(prefix="bigdl-accelerated-") as folder:
        directory = Path(folder, "model")
        InferenceOptimizer.save(found, directory)
        return nano_files(directory)


def _built(name: str, model, batches, threads):
    from bigdl.nano.pytorch import InferenceOptimizer
    from bigdl.nano.pytorch.methods import METHODS

    options: dict[str, Any] = {}
    if METHODS[name].precision == "int8":
        options = {"calib_data": batches, "sample_size": SAMPLE_ROWS}
    return InferenceOptimizer.build(
        model, name, input_sample=batches[0], thread_num=threads, **options
    )


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
            metric=Agreement(expected),
            thread_num=threads,
            includes=AUTO_METHODS,
            latency_sample_num=_TIMED_CALLS,
        )
        best, option = optimizer.get_best_model(accuracy_criterion=LARGEST_ERROR)
    logger.info("accelerate='auto' chose %s\n%s", option, printed.getvalue())
    return best


@dataclass(frozen=True)
class Agreement:
    """1 minus the relative error of a model's outputs: 1.0 for the original."""

    expected: list

    def __call__(self, model, data) -> float:
        from bigdl.nano.acceleration.accuracy import relative_error

        return 1.0 - relative_error(self.expected, _outputs(model, data))


def _outputs(model, batches) -> list:
    """All outputs for all batches, as one flat list of arrays."""
    import torch

    from bigdl.nano.acceleration.structure import flatten

    with torch.no_grad():
        results = [flatten(model(*batch))[0] for batch in batches]
    return [torch.as_tensor(leaf).float().numpy() for leaves in results for leaf in leaves]


def _complete(files, threads, snapshot: TorchSnapshot, sample: tuple) -> tuple[Saved, TorchReady]:
    """The files, with the original if they alone make no model; and that model."""
    saved = Saved(files, threads)
    try:
        return saved, saved.ready(None)
    except UsageError:
        saved = Saved(files, threads, snapshot, sample)
        return saved, saved.ready(None)


def _check(accelerate, found, expected) -> None:
    """Say so where the outputs are far from the model's own."""
    from bigdl.nano.acceleration.accuracy import relative_error

    if [each.shape for each in found] != [each.shape for each in expected]:
        raise UsageError(
            f"accelerate={str(accelerate)!r} is another model than the Estimator's: of the same "
            f"rows it makes outputs of shapes {_shapes(found)} instead of {_shapes(expected)}"
        )
    error = relative_error(expected, found)
    logger.info("accelerate=%r: relative error of the outputs %.2g", str(accelerate), error)
    if error > LARGEST_ERROR:
        logger.warning(
            "accelerate=%r: on a sample the outputs differ from those of the Estimator's own model "
            "by %.1f %%; use a method of higher precision if that is too much",
            str(accelerate),
            100 * error,
        )


def _shapes(outputs) -> str:
    return ", ".join(str(each.shape) for each in outputs[:4])
