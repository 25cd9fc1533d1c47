"""Automatic detection and acceleration of a model's frozen layers during training.

The first step is not observed. In the second step, the calls of modules without gradients are
recorded. If these modules do not change in the next steps, and the remaining steps repay the cost,
another runtime is built in a background thread. Its results are compared with those of the modules;
if they agree, the runtime replaces the modules during training steps. Between steps the model is
unchanged.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import bigdl.nano.pytorch.inference.methods  # noqa: F401 - registers the methods
from bigdl.common.errors import UsageError, one_line, require
from bigdl.nano.acceleration import autotune
from bigdl.nano.acceleration.method import BuildOptions, find_method
from bigdl.nano.acceleration.network_cache import largest_size, list_entries
from bigdl.nano.attribute_patch import AttributePatch
from bigdl.nano.pytorch.frozen.calls import Chain, MethodForward, Observation, chains_of
from bigdl.nano.pytorch.frozen.segment import FrozenSegment, distance, is_replaced
from bigdl.nano.pytorch.inference.network_models import source_fingerprint
from bigdl.nano.pytorch.inference.source import TorchSource
from bigdl.nano.pytorch.training.options import TrainingOptions
from bigdl.nano.pytorch.training.steps import bf16_instructions

_ROWS = 8  # rows of the sample
_CLOSE = 2e-6  # accepted relative distance of fp32 results
_ROUNDING = 1e-3  # relative distance above which results are bf16's and not fp32's
_CHANCE = 1.25  # tolerance of a row's largest bf16 distance: rounding differs between kernels
_LEAST_SECONDS = 0.004  # per step; below this, checks and copies cost the whole gain
_SHARE_SAVED = 0.3  # expected share of the modules' time, a careful estimate
_OBSERVED = 2  # number of the step that is observed
_FEW_STEPS = 64  # steps of a fit below which the first step is observed, though it is slow
_SHORT = 30  # remaining time, relative to the build's, below which training waits for the build
_MARGIN = 1.5  # safety factor of the build time
_CACHED_SHARE = 0.5  # cost of a build from a cached network, relative to a conversion
_STEPS_SEEN = 2  # steps in which the modules must not change
_STEPS_PLAIN = 3  # consecutive steps without the segment after which it is removed
_ROUNDS = 4  # attempts to observe and build
_RUNTIMES = {True: ("openvino_bf16", "openvino_fp32"), False: ("openvino_fp32",)}


class ErrorTolerance:
    """Tolerance for a runtime's error, based on the rounding errors of the original modules.

    Parameters
    ----------
    module : Module
        A private copy of the modules.
    sample : Tensor
        Its input.
    bf16 : bool
        True if the training may use bfloat16.

    Attributes
    ----------
    expected : Tensor
        Result of the modules in fp32.
    bf16, bf16_row : float
        Distances of the modules under autocast: overall, and the largest of a row times a
        tolerance. 0 if bf16 is not allowed.
    """

    def __init__(self, module: nn.Module, sample: torch.Tensor, bf16: bool):
        self._module, self._sample = module, sample
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            self.expected = lowered = module(sample)
            if bf16:
                with torch.autocast("cpu", torch.bfloat16):
                    lowered = module(sample)
        self.bf16 = distance(lowered, self.expected)
        self.bf16_row = _CHANCE * _largest_row(lowered, self.expected)

    @functools.cached_property
    def fp32(self) -> float:
        """Largest accepted distance between the results of an fp32 runtime and of the modules.

        It is four times the modules' distance from float64 results, because the order of sums may
        differ.
        """
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            exact = _in_double(self._module, self._sample)
        rounding = 0.0 if exact is None else distance(self.expected, exact)
        return max(_CLOSE, 4 * rounding)

    def judge(self, result: torch.Tensor) -> tuple[float, str | None]:
        """Return a result's relative error and the reason to reject it (None if accepted)."""
        if result.shape != self.expected.shape or not bool(torch.isfinite(result).all()):
            return float("inf"), "gives no such result"
        error = distance(result, self.expected)
        is_close = error <= self.bf16 and _largest_row(result, self.expected) <= self.bf16_row
        if error <= _CLOSE or is_close or error <= self.fp32:
            return error, None
        allowed = max(self.fp32, self.bf16)
        return error, f"has a relative error of {error:.2g}, and {allowed:.2g} is allowed"

    def bound(self, error: float) -> float:
        """Return the largest accepted error on other batches, given the error on the sample."""
        return 2 * (error + self.bf16) + 4 * (_CLOSE if self.bf16 > _ROUNDING else self.fp32)


def _in_double(module: nn.Module, sample: torch.Tensor) -> torch.Tensor | None:
    try:
        exact = copy.deepcopy(module).double()
        return exact(sample.double() if sample.is_floating_point() else sample)
    except Exception:  # code with a fixed dtype
        return None


def _largest_row(one: torch.Tensor, other: torch.Tensor) -> float:
    return max(distance(a, b) for a, b in zip(one, other, strict=True))


class AutomaticPrefix:
    """Acceleration of the frozen layers that are detected in a model's training steps.

    Parameters
    ----------
    model : Module
    wanted : bool, optional
        None builds the runtime if the remaining steps repay it. True always builds it, before the
        next step, so that runs are reproducible. False disables it.
    precision : str, optional
        Lightning's name of the training's precision.
    steps_left : callable
        Returns the number of remaining steps; None if unknown.
    notify : callable
        Called with a short phrase for the settings and a line for the log.

    Attributes
    ----------
    segments : list of FrozenSegment
    """

    def __init__(
        self,
        model: nn.Module,
        wanted: bool | None,
        precision: str | None,
        steps_left: Callable[[], float | None],
        notify: Callable[[str, str], None],
    ):
        self.segments: list[FrozenSegment] = []
        self._model, self._wanted, self._notify = model, wanted, notify
        self._steps_left = steps_left
        self._bf16 = precision in (None, "bf16-mixed", "16-mixed") and bool(bf16_instructions())
        self._fp32 = precision in (None, "32-true", "bf16-mixed", "16-mixed")
        self._steps = self._rounds = 0
        self._seen = 0  # steps since the observation
        self._left_alone: list[tuple[str, str]] = []
        self._notes: list[str] = []
        self._builds: list[_SegmentBuild] = []
        self._on = self._done = self._converted = False
        self._observed = _OBSERVED
        self._thread: threading.Thread | None = None
        self._done = wanted is False or getattr(model, "_compiler_ctx", None) is not None

    @property
    def is_building(self) -> bool:
        """True while another runtime is being built in the background."""
        return self._thread is not None

    @contextmanager
    def step(self, first: bool = False) -> Iterator[None]:
        """Context manager for one training step, which uses or prepares accelerated layers.

        Parameters
        ----------
        first : bool
            True if a short fit may observe its first step, as nothing else replaces ``forward``.
        """
        if self._done:
            yield
            return
        self._steps += 1
        if first and self._steps == 1 and (self._steps_left() or _FEW_STEPS) < _FEW_STEPS:
            self._observed = 1
        if self._on:
            with self._attached():
                yield
            self._run_safely(self._check)
        elif self._steps == self._observed:  # the first step is slow and may be repeated
            observation = Observation(self._model)
            with observation.recording():
                yield
            self._run_safely(self._on_observed, observation)
        else:
            yield
            if self._builds:
                self._run_safely(self._advance)

    def _run_safely(self, work: Callable[..., None], *args: object) -> None:
        """Call a function without autograd and autocast; if it fails, disable the acceleration."""
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                work(*args)
        except Exception as error:  # modules may raise anything
            self.segments.clear()
            self._builds.clear()
            self._on = False
            self._left_alone.insert(0, ("it", f"it cannot be inspected ({one_line(error)})"))
            self._stop()

    @contextmanager
    def _attached(self) -> Iterator[None]:
        attached = []
        try:
            for segment in self.segments:
                attached.append(segment)
                segment.attach()
            yield
        finally:
            for segment in reversed(attached):
                segment.detach()

    # -- after the observed step -------------------------------------------------------------------

    def _on_observed(self, observation: Observation) -> None:
        if any(is_replaced(part) for part in self._model.modules()):
            self._done = True  # accelerate_frozen_prefix has replaced them
            return
        chains, self._left_alone = chains_of(observation, repeated=True)
        self._rounds += 1
        if not chains and not self._left_alone:
            self._done = True  # nothing is frozen
            return
        if self._wanted is None and torch.are_deterministic_algorithms_enabled():
            text = "the step in which it is built depends on time, and the training must be "
            text += "deterministic; pass frozen_prefix=True"
            self._left_alone += [(_name_of(chain), text) for chain in chains]
            chains = []
        for chain in chains:
            seconds = sum(call.seconds for call in chain.calls)
            name = _name_of(chain)
            if not self._fp32:
                self._left_alone.append((name, "the training does not use fp32"))
            elif seconds < _LEAST_SECONDS and not self._wanted:
                text = f"it takes {1000 * seconds:.1f} ms of a step, so the gain is too small"
                self._left_alone.append((name, text))
            else:
                self._consider(chain, seconds)
        if not self._builds:
            self._stop()
        elif self._waits:
            self._advance()

    def _consider(self, chain: Chain, seconds: float) -> None:
        first = chain.calls[0]
        if first.input is None or first.input._version != first.before or not first.input.dim():
            self._left_alone.append((_name_of(chain), "its input is changed in place afterwards"))
            return
        try:
            segment = FrozenSegment(chain, bound=0.0)
            segment.sample = segment.sample[:_ROWS].clone()
            segment.output = segment.output[:_ROWS].clone()
            self._builds.append(_SegmentBuild(segment, copy.deepcopy(segment.module), seconds))
        except Exception as error:  # deepcopy of a module may raise anything
            self._left_alone.append((_name_of(chain), f"it cannot be copied ({one_line(error)})"))

    # -- building ----------------------------------------------------------------------------------

    def _advance(self) -> None:
        """Start a build, wait for the background thread, or activate finished segments."""
        self._seen += 1
        if self._thread is not None:
            if not self._thread.is_alive():
                self._on_work_done()
            return
        if self._seen < _STEPS_SEEN and not self._waits:
            return
        for build in list(self._builds):
            changed = build.segment.state.why_changed()
            if changed:
                self._drop(build, f"in training steps {changed.partition(';')[0]}")
            elif not self._wanted and not self._repays(build):
                if self._steps_left() is not None:
                    self._drop(build, f"the {self._steps_left():.0f} steps left do not repay it")
                else:
                    return  # more steps may repay it
        if not self._builds:
            self._stop()
            return
        self._start(lambda build: build.prepare(self._bf16))

    @property
    def _waits(self) -> bool:
        """True if training waits for the builds.

        Steps during a build are slow, and slow it down. In a short fit waiting costs less.
        """
        left = self._steps_left()
        if self._wanted or left is None:
            return bool(self._wanted)
        return all(
            each.is_cached or left * each.seconds < _SHORT * each.cost for each in self._builds
        )

    def _start(self, work: Callable[[_SegmentBuild], None]) -> None:
        """Run `work` on all builds in a thread, and wait for it if training waits."""

        def run() -> None:
            for build in self._builds:
                work(build)

        self._thread = threading.Thread(target=run, name="bigdl-frozen", daemon=True)
        self._thread.start()
        if self._waits:
            self._thread.join()
            self._on_work_done()

    def _on_work_done(self) -> None:
        self._thread = None
        if self._converted:
            self._activate()
            return
        self._converted = True
        for build in self._builds:
            build.convert()
        self._start(_SegmentBuild.finish)

    def _repays(self, build: _SegmentBuild) -> bool:
        left = self._steps_left()
        steps = self._steps if left is None else left  # guess: as many again
        return steps * build.seconds * _SHARE_SAVED > _MARGIN * build.cost

    def _drop(self, build: _SegmentBuild, reason: str) -> None:
        self._builds.remove(build)
        self._left_alone.append((build.segment.name, reason))

    def _activate(self) -> None:
        self._converted = False
        for build in self._builds:
            if build.reason is None:
                self.segments.append(build.segment)
                self._notes += build.notes
            else:
                self._left_alone.append((build.segment.name, build.reason))
        self._builds.clear()
        self._on = bool(self.segments)
        if self._on:
            self._report_state()
        else:
            self._stop()

    # -- running -----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Remove segments that fail, are not faster or are not used."""
        again = False
        for segment in list(self.segments):
            reason = segment.broken
            if reason is None and segment.intermediates_used > 1:
                reason = "outputs of its inner modules are used"
            if reason is None and not self._wanted and segment.is_slow():
                reason = f"{segment.method} is no faster here"
            if reason is None and segment.plain_calls >= _STEPS_PLAIN:
                reason = segment.reason or "its calls differ from the observed step's"
                again = self._rounds < _ROUNDS
            if reason is not None:
                self.segments.remove(segment)
                self._left_alone.append((segment.name, reason.partition(";")[0]))
                self._report_state()
        self._on = bool(self.segments)
        self._done = not self._on and not again
        if not self._on and again:
            self._steps, self._seen = self._observed - 1, 0  # observe the next step

    @property
    def report(self) -> str:
        """Report on how each segment runs and why other frozen modules are not accelerated."""
        lines = [
            f"{segment.name} by {segment.method}, relative error {segment.error:.2g}"
            + (f"; the original modules run because {segment.reason}" if segment.reason else "")
            for segment in self.segments
        ]
        lines += [f"{name} is not accelerated: {reason}" for name, reason in self._left_alone]
        return "; ".join([*lines, *self._notes])

    @property
    def phrase(self) -> str:
        """Short description of the frozen-layer acceleration, for the list of settings."""
        if self.segments:
            methods = " and ".join(dict.fromkeys(segment.method for segment in self.segments))
            reasons = [each.reason for each in self.segments if each.reason]
            return f"frozen prefix {methods}" + (f" until {reasons[0]}" if reasons else "")
        name, reason = self._left_alone[0]
        return f"no frozen prefix ({name}: {reason})"

    def _report_state(self) -> None:
        title = "Frozen prefix" if self.segments else "No frozen prefix"
        self._notify(self.phrase, f"{title}: {self.report}")

    def _stop(self) -> None:
        self._done = True
        if self._left_alone:
            self._report_state()

    def close(self) -> None:
        """Stop the acceleration after training, restore the model and report the final state."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._builds and not self._done:
            for build in list(self._builds):
                self._drop(build, "the training was over before it was built")
            self._stop()
        elif self.segments and any(segment.reason for segment in self.segments):
            self._report_state()
        self.segments.clear()
        self._done = True


class ForwardPrefix:
    """Acceleration of a model's frozen layers; each forward call counts as a training step.

    Parameters
    ----------
    model : Module
    options : TrainingOptions
    notify : callable
        See :class:`AutomaticPrefix`.
    """

    def __init__(
        self, model: nn.Module, options: TrainingOptions, notify: Callable[[str, str], None]
    ):
        self._replaced = AttributePatch()
        wanted, precision = options.frozen_prefix, options.precision
        self.automatic = AutomaticPrefix(model, wanted, precision, lambda: None, notify)
        if wanted is not False:
            self._replaced.set(model, "forward", _TrainingForward(model, self.automatic))

    def undo(self) -> None:
        """Stop the acceleration and restore the model's forward."""
        self.automatic.close()
        self._replaced.undo()


class _TrainingForward(MethodForward):
    """Forward method of a whole model; its calls in training mode are training steps."""

    def __init__(self, module: nn.Module, automatic: AutomaticPrefix):
        super().__init__(module)
        self._automatic, self._inside = automatic, False

    def __call__(self, *args: object, **kwargs: object) -> object:
        plain = self._inside or not self.module.training or not torch.is_grad_enabled()
        if plain or torch.compiler.is_compiling() or torch.jit.is_tracing():
            return self.forward(*args, **kwargs)
        self._inside = True
        try:
            with self._automatic.step():
                return self.forward(*args, **kwargs)
        finally:
            self._inside = False


def replace_prefix_phrase(settings: Sequence[str], phrase: str) -> tuple[str, ...]:
    """Return the settings with their phrase about the frozen layers replaced by `phrase`."""
    others = (each for each in settings if "frozen prefix" not in each)
    return (*others, phrase)


class _SegmentBuild:
    """Build of one segment: copy of the modules, conversion to a network, and compilation."""

    def __init__(self, segment: FrozenSegment, module: nn.Module, seconds: float):
        self.segment, self.seconds = segment, seconds
        self.notes: list[str] = []
        self.reason: str | None = None
        segment.state  # noqa: B018 - captures the state; later changes are detected
        self._module: Any = module
        self._options = BuildOptions(thread_num=torch.get_num_threads())
        self._methods: list[Any] = []
        self._accuracy: Any = None
        self._source: Any = TorchSource(module, (segment.sample,))
        self._network: Any = None
        self._weights = sum(parameter.numel() for parameter in module.parameters())

    @functools.cached_property
    def _key(self) -> str | None:
        """Digest of the modules before the build, for estimates and measurements of speed."""
        if not largest_size():
            return None
        return source_fingerprint(self._source)

    @functools.cached_property
    def is_cached(self) -> bool:
        """True if an earlier fit has probably converted the same modules and measured methods."""
        return self._key is not None and any(
            entry.about.get("source") == self._key for entry in list_entries()
        )

    @property
    def cost(self) -> float:
        """Approximate seconds of the build."""
        share = _CACHED_SHARE if self.is_cached else 1.0
        return share * (1.0 + self._weights / 2.5e7)

    def prepare(self, bf16: bool) -> None:
        """Compute the reference results and import the runtime; may run in any thread."""
        try:
            _check_data_independent(self._module, self.segment)
        except Exception as error:
            self.reason = f"its code depends on values of its input ({one_line(error)})"
            return
        for name in _RUNTIMES[bf16]:
            method = find_method(name)
            try:
                method.require()
                self._methods.append(method)
            except UsageError as error:
                self.reason = f"{name} is impossible: {one_line(error)}"
        if not self._methods:
            return
        self.reason = None
        require("openvino", "nano")  # a slow import

        lowered = bf16 or self.segment.autocast is not None
        self._accuracy = ErrorTolerance(self._module, self.segment.sample, lowered)

    def convert(self) -> None:
        """Convert the modules to a network between steps, as converters set warning filters."""
        if self.reason is not None:
            return
        try:
            self._source.fingerprint = self._key
            self._network = self._methods[0].convert(self._source, self._options)
        except Exception as error:  # tracers and frontends may raise anything
            self.reason = f"it cannot be converted ({one_line(error)})"

    def finish(self) -> None:
        """Compile and check the network and select the fastest method; may run in any thread."""
        runs: dict[str, tuple[_ContiguousCall, float]] = {}
        try:
            for method in self._methods if self.reason is None else ():
                network = self._network.clone()
                run = _ContiguousCall(method.model_of(network, self._source, self._options))
                with torch.no_grad():
                    result = run(self.segment.sample)
                error, reason = self._accuracy.judge(result)
                if reason is None:
                    runs[method.name] = run, error
                else:
                    self.reason = f"{method.name} {reason}"
                    self.notes.append(f"{self.segment.name}: {self.reason}")
            if runs:
                name = self._fastest(runs)
                run, error = runs[name]
                self.segment.bound = self._accuracy.bound(error)
                self.segment.use(name, run, error)
                self.reason = None
        except Exception as error:  # runtimes may raise anything
            self.reason = f"it cannot be built ({one_line(error)})"
        finally:
            self._network = self._source = self._module = self._accuracy = None

    def _fastest(self, runs: dict[str, tuple[_ContiguousCall, float]]) -> str:
        """Return the name of the fastest method on this processor."""
        sample = self.segment.sample
        calls = {name: functools.partial(run, sample) for name, (run, _) in runs.items()}
        plain = list(runs)[-1]  # fp32, if it is accurate
        if len(runs) == 1:
            return plain
        with torch.no_grad():
            if self._key is None:
                return autotune.choose(autotune.benchmark(calls), plain).name
            key = autotune.cache_key("frozen layers", self._key, self._options.thread_num)
            return autotune.load_or_measure(key, plain, calls).name


class _ContiguousCall:
    """Callable that passes contiguous input to a built model."""

    def __init__(self, built: Callable[[torch.Tensor], torch.Tensor]):
        self._built = built

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._built(x.contiguous())  # torch copies channels faster than NumPy does


def _check_data_independent(module: nn.Module, segment: FrozenSegment) -> None:
    """Run the module with fake tensors, which raises if its code depends on tensor values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        module(mode.from_tensor(segment.sample))


def _name_of(chain: Chain) -> str:
    names = [call.name for call in chain.calls]
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
