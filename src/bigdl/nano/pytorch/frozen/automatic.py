"""The frozen part of a model is found while it is trained, and runs fast where that is safe.

The first step is the program's alone. The second notes which modules are called without gradients
and what they take. If nothing of them changes in the next steps, and those that are left repay
it, another runtime is built beside the training; what it gives is held against the modules
themselves, and from then on it runs in training steps. Between steps the model is the program's.
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
from bigdl.nano.attribute_patch import AttributePatch
from bigdl.nano.pytorch.frozen.calls import Chain, MethodForward, Observation, chains_of
from bigdl.nano.pytorch.frozen.segment import FrozenSegment, distance, is_replaced
from bigdl.nano.pytorch.inference.source import TorchSource
from bigdl.nano.pytorch.training.options import TrainingOptions
from bigdl.nano.pytorch.training.steps import bf16_instructions

_ROWS = 8  # of the sample
_CLOSE = 2e-6  # relative distance of results in fp32
_ROUNDING = 1e-3  # relative distance of results in bf16, at least; less: the modules stay in fp32
_CHANCE = 1.25  # of the largest distance of a row in bf16: two equally good ways differ by rounding
_LEAST_SECONDS = 0.004  # a step, below which checks and copies cost what there is to gain
_SHARE_SAVED = 0.3  # of what the modules take; less than usual
_OBSERVED = 2  # the step that is observed
_MARGIN = 1.5  # of what building may cost
_STEPS_SEEN = 2  # in which nothing may change
_STEPS_PLAIN = 3  # one after the other, in which a segment does not run, until it is given up
_ROUNDS = 4  # of finding and building
_RUNTIMES = {True: ("openvino_bf16", "openvino_fp32"), False: ("openvino_fp32",)}


class ErrorTolerance:
    """Distances from exact results: that of the modules, and that which another way may have.

    Parameters
    ----------
    module : Module
        Nobody else uses it.
    sample : Tensor
        Its input.
    bf16 : bool
        True if the training may use bfloat16.

    Attributes
    ----------
    expected : Tensor
        What the modules give in fp32.
    bf16, bf16_row : float
        Distances of the modules under autocast: of all, and the largest of a row, with some
        room for chance. 0 where there must be no bf16.
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
        """The largest distance of a runtime in fp32: that of the modules to exact numbers.

        There is some room for another order of sums.
        """
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            exact = _in_double(self._module, self._sample)
        own = 0.0 if exact is None else distance(self.expected, exact)
        return max(_CLOSE, 4 * own)

    def judged(self, result: torch.Tensor) -> tuple[float, str | None]:
        """Return the relative error of a result, and why it is not good enough."""
        if result.shape != self.expected.shape or not bool(torch.isfinite(result).all()):
            return float("inf"), "gives no such result"
        error = distance(result, self.expected)
        is_close = error <= self.bf16 and _largest_row(result, self.expected) <= self.bf16_row
        if error <= _CLOSE or is_close or error <= self.fp32:
            return error, None
        allowed = max(self.fp32, self.bf16)
        return error, f"has a relative error of {error:.2g}, and {allowed:.2g} is allowed"

    def bound(self, error: float) -> float:
        """Return how far the results of other batches may be, given that of the sample."""
        return 2 * (error + self.bf16) + 4 * (_CLOSE if self.bf16 > _ROUNDING else self.fp32)


def _in_double(module: nn.Module, sample: torch.Tensor) -> torch.Tensor | None:
    try:
        exact = copy.deepcopy(module).double()
        return exact(sample.double() if sample.is_floating_point() else sample)
    except Exception:  # code that names a type
        return None


def _largest_row(one: torch.Tensor, other: torch.Tensor) -> float:
    return max(distance(a, b) for a, b in zip(one, other, strict=True))


class AutomaticPrefix:
    """Finds the frozen part of a model in its training steps, and speeds it up.

    Parameters
    ----------
    model : Module
    wanted : bool, optional
        None builds it if the steps that are left repay it; True builds it in any case, before the
        next step, which is then the same in each run.
    precision : str, optional
        Of the training, as Lightning names it.
    steps_left : callable
        Returns how many steps there will be; None if nobody knows.
    tell : callable
        Gets a phrase for the settings, and a line for the log.

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
        tell: Callable[[str, str], None],
    ):
        self.segments: list[FrozenSegment] = []
        self._model, self._wanted, self._tell = model, wanted, tell
        self._steps_left = steps_left
        self._bf16 = precision in (None, "bf16-mixed", "16-mixed") and bool(bf16_instructions())
        self._fp32 = precision in (None, "32-true", "bf16-mixed", "16-mixed")
        self._steps = self._rounds = 0
        self._seen = 0  # steps since the observation
        self._left_alone: list[tuple[str, str]] = []
        self._notes: list[str] = []
        self._builds: list[_Build] = []
        self._on = self._done = self._converted = False
        self._thread: threading.Thread | None = None
        self._done = wanted is False or getattr(model, "_compiler_ctx", None) is not None

    @property
    def is_building(self) -> bool:
        """True while another runtime is made beside the training."""
        return self._thread is not None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run a training step."""
        if self._done:
            yield
            return
        self._steps += 1
        if self._on:
            with self._attached():
                yield
            self._safely(self._check)
        elif self._steps == _OBSERVED:  # the first may be made twice, and is slow
            observation = Observation(self._model)
            with observation.watching():
                yield
            self._safely(self._found, observation)
        else:
            yield
            if self._builds:
                self._safely(self._go_on)

    def _safely(self, work: Callable[..., None], *args: object) -> None:
        """Do something that the training must not suffer from, and with autocast as outside."""
        try:
            with torch.no_grad(), torch.autocast("cpu", enabled=False):
                work(*args)
        except Exception as error:  # modules may be of any kind
            self.segments.clear()
            self._builds.clear()
            self._on = False
            self._left_alone.insert(0, ("it", f"it cannot be looked at ({one_line(error)})"))
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

    # -- found -------------------------------------------------------------------------------------

    def _found(self, observation: Observation) -> None:
        if any(is_replaced(part) for part in self._model.modules()):
            self._done = True  # by accelerate_frozen_prefix
            return
        chains, self._left_alone = chains_of(observation, repeated=True)
        self._rounds += 1
        if not chains and not self._left_alone:
            self._done = True  # nothing is frozen
            return
        if self._wanted is None and torch.are_deterministic_algorithms_enabled():
            text = "when it is built depends on time, and the training is to be deterministic; "
            text += "pass frozen_prefix=True"
            self._left_alone += [(_name_of(chain), text) for chain in chains]
            chains = []
        for chain in chains:
            seconds = sum(call.seconds for call in chain.calls)
            name = _name_of(chain)
            if not self._fp32:
                self._left_alone.append((name, "the training has another precision"))
            elif seconds < _LEAST_SECONDS and not self._wanted:
                text = f"it takes {1000 * seconds:.1f} ms of a step, too little to gain"
                self._left_alone.append((name, text))
            else:
                self._consider(chain, seconds)
        if not self._builds:
            self._stop()
        elif self._wanted:
            self._go_on()

    def _consider(self, chain: Chain, seconds: float) -> None:
        first = chain.calls[0]
        if first.input is None or first.input._version != first.before or not first.input.dim():
            self._left_alone.append((_name_of(chain), "its input is changed in place afterwards"))
            return
        try:
            segment = FrozenSegment(chain, bound=0.0)
            segment.sample = segment.sample[:_ROWS].clone()
            segment.output = segment.output[:_ROWS].clone()
            self._builds.append(_Build(segment, copy.deepcopy(segment.module), seconds))
        except Exception as error:  # of a copy: modules may hold anything
            self._left_alone.append((_name_of(chain), f"it cannot be copied ({one_line(error)})"))

    # -- built -------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Build, or wait, or let the segments run."""
        self._seen += 1
        if self._thread is not None:
            if not self._thread.is_alive():
                self._after_work()
            return
        if self._seen < _STEPS_SEEN and not self._wanted:
            return
        for build in list(self._builds):
            changed = build.segment.state.why_changed()
            if changed:
                self._drop(build, f"in training steps {changed.partition(';')[0]}")
            elif not self._wanted and not self._repays(build):
                if self._steps_left() is not None:
                    self._drop(build, f"the {self._steps_left():.0f} steps left do not repay it")
                else:
                    return  # it may yet
        if not self._builds:
            self._stop()
            return
        self._start(lambda build: build.prepare(self._bf16))

    def _start(self, work: Callable[[_Build], None]) -> None:
        """Work on all builds beside the training; at once if the program wants it in any case."""

        def run() -> None:
            for build in self._builds:
                work(build)

        self._thread = threading.Thread(target=run, name="bigdl-frozen", daemon=True)
        self._thread.start()
        if self._wanted:
            self._thread.join()
            self._after_work()

    def _after_work(self) -> None:
        self._thread = None
        if self._converted:
            self._switch_on()
            return
        self._converted = True
        for build in self._builds:
            build.convert()
        self._start(_Build.finish)

    def _repays(self, build: _Build) -> bool:
        left = self._steps_left()
        steps = self._steps if left is None else left  # as many as there were
        return steps * build.seconds * _SHARE_SAVED > _MARGIN * build.cost

    def _drop(self, build: _Build, reason: str) -> None:
        self._builds.remove(build)
        self._left_alone.append((build.segment.name, reason))

    def _switch_on(self) -> None:
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
            self._say()
        else:
            self._stop()

    # -- running -----------------------------------------------------------------------------------

    def _check(self) -> None:
        """Leave off what does not run, or is no faster."""
        again = False
        for segment in list(self.segments):
            reason = segment.broken
            if reason is None and segment.opened > 1:
                reason = "what is between its modules is used"
            if reason is None and not self._wanted and segment.is_slow():
                reason = f"{segment.method} is no faster here"
            if reason is None and segment.plain_calls >= _STEPS_PLAIN:
                reason = segment.reason or "it is called in another way"
                again = self._rounds < _ROUNDS
            if reason is not None:
                self.segments.remove(segment)
                self._left_alone.append((segment.name, reason.partition(";")[0]))
                self._say()
        self._on = bool(self.segments)
        self._done = not self._on and not again
        if not self._on and again:
            self._steps, self._seen = _OBSERVED - 1, 0  # of the next step

    @property
    def report(self) -> str:
        """Return how each part runs, and why the rest does not."""
        lines = [
            f"{segment.name} by {segment.method}, relative error {segment.error:.2g}"
            + (f"; runs as written because {segment.reason}" if segment.reason else "")
            for segment in self.segments
        ]
        lines += [f"{name} is left alone, {reason}" for name, reason in self._left_alone]
        return "; ".join([*lines, *self._notes])

    @property
    def phrase(self) -> str:
        """The same for the settings."""
        if self.segments:
            methods = " and ".join(dict.fromkeys(segment.method for segment in self.segments))
            reasons = [each.reason for each in self.segments if each.reason]
            return f"frozen prefix {methods}" + (f" until {reasons[0]}" if reasons else "")
        name, reason = self._left_alone[0]
        return f"no frozen prefix ({name}: {reason})"

    def _say(self) -> None:
        title = "Frozen prefix" if self.segments else "No frozen prefix"
        self._tell(self.phrase, f"{title}: {self.report}")

    def _stop(self) -> None:
        self._done = True
        if self._left_alone:
            self._say()

    def close(self) -> None:
        """End with the training; the model is as written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._builds and not self._done:
            for build in list(self._builds):
                self._drop(build, "the training was over before it was built")
            self._stop()
        elif self.segments and any(segment.reason for segment in self.segments):
            self._say()
        self.segments.clear()
        self._done = True


class PrefixOfCalls:
    """The frozen part of a model that a loop calls in training mode.

    Parameters
    ----------
    model : Module
    options : TrainingOptions
    tell : callable
        As for :class:`AutomaticPrefix`.
    """

    def __init__(
        self, model: nn.Module, options: TrainingOptions, tell: Callable[[str, str], None]
    ):
        self._replaced = AttributePatch()
        wanted, precision = options.frozen_prefix, options.precision
        self.automatic = AutomaticPrefix(model, wanted, precision, lambda: None, tell)
        if wanted is not False:
            self._replaced.set(model, "forward", _CallInTraining(model, self.automatic))

    def undo(self) -> None:
        """Leave the model as it was."""
        self.automatic.close()
        self._replaced.undo()


class _CallInTraining(MethodForward):
    """The forward of a whole model, whose calls in training mode with gradients are steps."""

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


def with_prefix(settings: Sequence[str], phrase: str) -> tuple[str, ...]:
    """Return settings with a phrase about the frozen prefix in the place of an earlier one."""
    others = (each for each in settings if "frozen prefix" not in each)
    return (*others, phrase)


class _Build:
    """The stages of a segment: a copy of its modules, then a network, then a compiled one."""

    def __init__(self, segment: FrozenSegment, module: nn.Module, seconds: float):
        self.segment, self.seconds = segment, seconds
        self.notes: list[str] = []
        self.reason: str | None = None
        segment.state  # noqa: B018 - from now on nothing may change
        self._module: Any = module
        self._options = BuildOptions(thread_num=torch.get_num_threads())
        self._methods: list[Any] = []
        self._accuracy: Any = None
        self._source: Any = None
        self._network: Any = None
        weights = sum(parameter.numel() for parameter in module.parameters())
        self.cost = 1.0 + weights / 2.5e7  # seconds, about

    def prepare(self, bf16: bool) -> None:
        """Find out what the modules give, and load the runtime; in any thread."""
        try:
            _check_data_independent(self._module, self.segment)
        except Exception as error:
            self.reason = f"its code looks at values of its input ({one_line(error)})"
            return
        for name in _RUNTIMES[bf16]:
            method = find_method(name)
            try:
                method.require()
                self._methods.append(method)
            except UsageError as error:
                self.reason = f"{name} is not possible, {one_line(error)}"
        if not self._methods:
            return
        self.reason = None
        require("openvino", "nano")  # its import takes long

        lowered = bf16 or self.segment.autocast is not None
        self._accuracy = ErrorTolerance(self._module, self.segment.sample, lowered)

    def convert(self) -> None:
        """Make a network. It sets warnings of the process, so no step may run meanwhile."""
        if self.reason is not None:
            return
        try:
            self._source = TorchSource(self._module, (self.segment.sample,))
            self._network = self._methods[0].convert(self._source, self._options)
        except Exception as error:  # tracers and frontends raise whatever they like
            self.reason = f"it cannot be converted ({one_line(error)})"

    def finish(self) -> None:
        """Compile and check; in any thread."""
        runs: dict[str, tuple[_ContiguousCall, float]] = {}
        try:
            for method in self._methods if self.reason is None else ():
                network = self._network.clone()
                run = _ContiguousCall(method.model_of(network, self._source, self._options))
                with torch.no_grad():
                    result = run(self.segment.sample)
                error, reason = self._accuracy.judged(result)
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
        except Exception as error:  # runtimes raise whatever they like
            self.reason = f"it cannot be built ({one_line(error)})"
        finally:
            self._network = self._source = self._module = self._accuracy = None

    def _fastest(self, runs: dict[str, tuple[_ContiguousCall, float]]) -> str:
        """Return the name of the way that is fastest on this processor."""
        sample = self.segment.sample
        calls = {name: functools.partial(run, sample) for name, (run, _) in runs.items()}
        plain = list(runs)[-1]  # fp32, if it is accurate
        if len(runs) == 1:
            return plain
        with torch.no_grad():
            return autotune.choose(autotune.benchmark(calls), plain).name


class _ContiguousCall:
    """A call of a built model."""

    def __init__(self, built: Callable[[torch.Tensor], torch.Tensor]):
        self._built = built

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._built(x.contiguous())  # torch copies channels faster than NumPy does


def _check_data_independent(module: nn.Module, segment: FrozenSegment) -> None:
    """Run with tensors that have a shape but no values."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
        module(mode.from_tensor(segment.sample))


def _name_of(chain: Chain) -> str:
    names = [call.name for call in chain.calls]
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
