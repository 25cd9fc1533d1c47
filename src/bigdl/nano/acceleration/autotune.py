"""Benchmarks of implementation variants, with results cached for later processes.

The fastest precision, layout or runtime depends on the processor, so it is measured. Each result
is a small file in ``~/.cache/bigdl/choices``, or below ``XDG_CACHE_HOME``. Its name is a digest of
the model, the processor, the thread count and the library versions. If a file is lost, the variants
are measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bigdl.common.cpu import isa_flags, processor_name, usable_cores
from bigdl.common.errors import user_stacklevel
from bigdl.common.private_folders import cache_directory, is_writable_only_by_user, remove_old
from bigdl.common.program_state import preserve_rng_state
from bigdl.common.timeouts import OLD_CHOICE_S
from bigdl.nano.acceleration.median_interval import MedianInterval
from bigdl.nano.acceleration.method import Method
from bigdl.nano.acceleration.precision import FP32

MOST_FILES = 256
_MOST_BYTES = 1 << 16  # of one file
LEAST_GAIN = 1.03
"""Smallest speed-up at which another variant replaces the baseline."""


class AutotuneResult(NamedTuple):
    """Name of the fastest variant, and the speed-up of each variant over the baseline.

    Attributes
    ----------
    name : str
        The selected variant.
    speedups : dict of str to MedianInterval
        Speed-up over the baseline of each measured variant.
    """

    name: str
    speedups: dict[str, MedianInterval]

    @property
    def speedup(self) -> MedianInterval:
        """Speed-up of the selected variant over the baseline."""
        return self.speedups[self.name]

    def is_clear(self, plain: str) -> bool:
        """Return False if the baseline was selected but noise might hide a faster variant."""
        others = [speedup for name, speedup in self.speedups.items() if name != plain]
        return self.name != plain or all(each.high <= LEAST_GAIN for each in others)

    def to_json(self) -> dict[str, Any]:
        """Return the result as a JSON-serializable dict."""
        return {"name": self.name, "speedups": {key: [*s] for key, s in self.speedups.items()}}

    @classmethod
    def from_json(cls, content: Any) -> AutotuneResult | None:  # content: any JSON
        """Build an AutotuneResult from :meth:`to_json` output, or return None if invalid."""
        try:
            speedups = {
                str(key): MedianInterval(*map(float, s)) for key, s in content["speedups"].items()
            }
            return cls(content["name"], speedups) if content["name"] in speedups else None
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


def choose(
    seconds: Mapping[str, Sequence[float]], plain: str, allowed: Iterable[str] | None = None
) -> AutotuneResult:
    """Select the fastest variant if it beats the baseline by more than noise, else the baseline.

    Parameters
    ----------
    seconds : mapping of str to sequence of float
        Times of each variant, one per round. All variants run within each round, one after the
        other. A variant that was abandoned has fewer rounds.
    plain : str
        Name of the baseline.
    allowed : iterable of str, optional
        Variants that may be selected, including the baseline; all by default.

    Returns
    -------
    AutotuneResult

    Examples
    --------
    >>> from bigdl.nano.acceleration.autotune import choose
    >>> rounds = {"fp32": [1.0, 1.1, 1.0], "bf16": [0.5, 0.5, 0.6], "int8": [0.9, 1.2, 1.0]}
    >>> choose(rounds, "fp32").name
    'bf16'
    >>> choose({"fp32": [1.0, 1.1, 1.0], "bf16": [1.5, 1.6, 1.4]}, "fp32").name
    'fp32'
    """
    reference = seconds[plain]
    speedups = {
        name: MedianInterval.of([a / b for a, b in zip(reference, rounds, strict=False)])
        for name, rounds in seconds.items()
        if rounds
    }
    names = set(speedups if allowed is None else allowed)
    faster = [
        name
        for name, speedup in speedups.items()
        if name in names and name != plain and speedup.exceeds(LEAST_GAIN)
    ]
    best = max(faster, key=lambda name: speedups[name].middle, default=plain)
    return AutotuneResult(best, speedups)


_ROUNDS = 20
_FEWEST_ROUNDS = 3
_LEAST_S = 1e-3  # of a round: reduces the influence of clock and scheduler


def benchmark(
    calls: Mapping[str, Callable[[], object]], budget_s: float = 1.0
) -> dict[str, list[float]]:
    """Time calls of several variants in alternating rounds; return the seconds per call.

    Parameters
    ----------
    calls : mapping of str to callable
        Variants that compute the same result.
    budget_s : float
        Seconds after which no further round starts. At least three rounds run.

    Returns
    -------
    dict of str to list of float
        Seconds per call of each round; at most twenty rounds. Input of :func:`choose`.
    """
    counts, names = {}, list(calls)
    begin = time.perf_counter()
    for name, call in calls.items():
        call()  # warm-up
        counts[name] = max(1, round(_LEAST_S / max(_seconds(call, 1), 1e-7)))
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(_ROUNDS):
        if number >= _FEWEST_ROUNDS and time.perf_counter() - begin > budget_s:
            break
        for name in names if number % 2 else reversed(names):
            seconds[name].append(_seconds(calls[name], counts[name]))
    return seconds


def _seconds(call: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def load_or_measure(
    key: str, plain: str, calls: Mapping[str, Callable[[], object]]
) -> AutotuneResult:
    """Return the cached result for a key, or measure the variants and cache the result.

    Parameters
    ----------
    key : str
        From :func:`cache_key`.
    plain : str
        See :func:`choose`.
    calls : mapping of str to callable
        See :func:`benchmark`.
    """
    kept = load_result(key)
    if kept is not None and set(calls) <= set(kept.speedups):
        return kept
    choice = choose(benchmark(calls), plain)
    if choice.is_clear(plain):
        save_result(key, choice)
    return choice


def cache_key(*facts: object) -> str:
    """Return a digest of JSON values, the processor model and the number of usable cores."""
    surroundings = [processor_name(), sorted(isa_flags()), len(usable_cores())]
    text = json.dumps([facts, surroundings], sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def load_result(key: str) -> AutotuneResult | None:
    """Return the cached AutotuneResult for a key, or None."""
    directory = cache_directory("choices")
    file = directory / f"{key}.json"
    try:
        if not is_writable_only_by_user(directory) or file.stat().st_size > _MOST_BYTES:
            return None
        return AutotuneResult.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None


def save_result(key: str, choice: AutotuneResult) -> None:
    """Write a result to the cache; do nothing if the directory is unwritable or not private."""
    directory = cache_directory("choices")
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not is_writable_only_by_user(directory):
            return
        # atomic rename: other processes may read and write the same file
        number, name = tempfile.mkstemp(prefix=".new-", dir=directory)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(choice.to_json(), file)
        os.replace(name, directory / f"{key}.json")
        _shrink(directory)


def count_results() -> int:
    """Return the number of cached results."""
    return len(list(cache_directory("choices").glob("*.json")))


def clear_results() -> int:
    """Remove all cached results and return their number."""
    files = list(cache_directory("choices").glob("*.json"))
    for file in files:
        file.unlink(missing_ok=True)
    return len(files)


def _shrink(directory: Path) -> None:
    remove_old(directory.iterdir(), OLD_CHOICE_S)
    files = sorted(directory.iterdir(), key=lambda file: file.stat().st_mtime, reverse=True)
    for file in files[MOST_FILES:]:
        file.unlink(missing_ok=True)


_LEAST_CALL_S = 1e-4  # of the original: below this, call overhead dominates
_SLOWER = 1.1
_RACE_S = 0.5


def warn_if_slower(
    method: Method, original: Callable[[], Any], model: Callable[[], Any], *facts: object
) -> None:
    """Warn if a model in a precision below fp32 is slower than the original.

    Parameters
    ----------
    method : Method
        Method of the model; fp32 models are not measured.
    original, model : callable
        Functions that run the models on the sample.
    *facts
        JSON values that describe model, sample and threads. They are the cache key: equal facts
        are measured once.
    """
    if method.precision == FP32:
        return
    key = cache_key("beside the original", method.name, facts)
    choice = load_result(key)
    if choice is None:
        with preserve_rng_state():  # the models may draw random numbers
            seconds = benchmark({"original": original, method.name: model}, _RACE_S)
        if min(seconds["original"]) < _LEAST_CALL_S:
            return
        choice = choose(seconds, "original")
        save_result(key, choice)
    speedup = choice.speedups[method.name]
    times = MedianInterval(1 / speedup.middle, 1 / speedup.high, 1 / speedup.low)
    if times.exceeds(_SLOWER):
        warnings.warn(
            f"{method.name} takes {times:.2f} times as long as the original on this processor; "
            "InferenceOptimizer().optimize measures which method is fast",
            stacklevel=user_stacklevel(),
        )
