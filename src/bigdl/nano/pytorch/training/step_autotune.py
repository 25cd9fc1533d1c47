"""The choice of precision and layout of a training, by a measurement on this processor.

Which of float32 and bfloat16, and of contiguous tensors and channels-last ones, is fast depends on
the processor and the model. A fit begins as the plain program would. Where the steps that are left
repay it, the first step notes what the model is called with; before the next one, a copy of the
model computes these calls, forwards and backwards, in each way in turn. Weights, optimizers,
statistics of normalization, random numbers and the order of data stay as they are. What was chosen
is kept for later fits of such a model on such a processor, which begin with it.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from bigdl.common.cpu import isa_flags
from bigdl.common.errors import one_line
from bigdl.nano.acceleration import autotune
from bigdl.nano.acceleration.autotune import AutotuneResult
from bigdl.nano.attribute_patch import AttributePatch, ForwardOverride

_ROUNDS = 5
_TRIED = 2  # rounds after which a way that is slow is given up
_CLOSE = 1.15  # times as slow as the fastest, in the best of these rounds
REPAID_STEPS = 800  # steps: a measurement takes as long as about twenty
REPAID_STEPS_AMX = 100  # a processor with AMX is likely to gain a factor
_MOST_CALLS = 64  # of parts in a step
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


T = TypeVar("T")


class StepConfig(NamedTuple):
    """One way to compute a training step.

    Attributes
    ----------
    bf16 : bool
        Whether layers compute in bfloat16, by autocast.
    channels_last : bool
        Whether images have their channels last in memory.
    """

    bf16: bool
    channels_last: bool

    @property
    def name(self) -> str:
        precision = "bfloat16" if self.bf16 else "float32"
        return f"{precision} with channels_last" if self.channels_last else precision


class RecordedCall(NamedTuple):
    """A call of a part of a model in a step: the part's name, and copies of the arguments."""

    part: str
    args: tuple
    kwargs: dict[str, Any]


def bf16_instructions(device: str = "cpu") -> str | None:
    """Return the instruction set by which a processor multiplies bfloat16, if it has one.

    That it has one does not say that it is fast by it.
    """
    if device == "cuda":
        return "CUDA" if torch.cuda.is_bf16_supported(including_emulation=False) else None
    flags = isa_flags()
    return next((name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in flags), None)


class StepAutotuner:
    """Chooses the way of a training's steps.

    Parameters
    ----------
    parts : mapping of str to Module
        The module that is trained, under the name "", and its parts that compute.
    ways : sequence of StepConfig
        To choose from; the first is the plain one.
    others : sequence of StepConfig
        Measured beside them, for a warning where one of them is faster.
    device : {"cpu", "cuda"}
    steps_left : callable
        Returns how many steps there will be; None if nobody knows.
    broadcast : callable, optional
        Returns what rank 0 gave; None in a single process.
    """

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        ways: Sequence[StepConfig],
        others: Sequence[StepConfig] = (),
        *,
        device: str = "cpu",
        steps_left: Callable[[], float | None] = lambda: None,
        broadcast: Callable[[Any], Any] | None = None,
    ):
        self._parts, self._ways, self._others = dict(parts), list(ways), list(others)
        self._device, self._steps_left, self._broadcast = device, steps_left, broadcast
        self._steps = 0
        self._key = ""
        self._calls: list[RecordedCall] | None = None
        self.is_over = len(self._ways) + len(self._others) < 2
        self.reason = ""

    @property
    def plain(self) -> StepConfig:
        """The way of the first steps."""
        return self._ways[0]

    def begin(
        self, batch: object, *, possible: bool = True
    ) -> tuple[StepConfig, AutotuneResult] | None:
        """Choose before a step, if it is time to.

        Parameters
        ----------
        batch
            Of the step; its sizes are part of what a kept choice depends on.
        possible : bool
            False while something else decides how parts of the model run.

        Returns
        -------
        tuple of StepConfig and AutotuneResult, or None
            What was chosen, once.
        """
        if self.is_over:
            return None
        self._steps += 1
        if self._steps == 1:
            if torch.are_deterministic_algorithms_enabled():
                self._end("a measurement depends on time, and the training is to be deterministic")
                return None
            self._key = self._key_of(batch)
            kept = self._agreed(lambda: autotune.load_result(self._key))
            if kept is not None and self._way(kept.name) is not None:
                return self._chosen(kept)
            return None
        if self._calls is None:
            return None  # the step before this one is not the one that was observed
        calls, self._calls = self._calls, None
        if not possible or not calls:
            self._end("the layers are not called as modules" if possible else "")
            return None
        return self._measure(calls)

    @contextlib.contextmanager
    def observed(self) -> Iterator[None]:
        """Note the calls of a step if the next one begins with a measurement."""
        if not self._is_due or not self._agreed(self._is_time):
            yield
            return
        calls: list[RecordedCall] = []
        with _Recorder(self._parts, calls).recording():
            yield
        self._calls = calls

    def observe(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note a call of the whole module, as :meth:`observed` does for a step."""
        if self._is_due and self._agreed(self._is_time):
            self._calls = [RecordedCall("", *_copied((args, kwargs)))]

    @property
    def _is_due(self) -> bool:
        """True in the steps in which all processes ask whether to measure."""
        return not self.is_over and self._steps in (1, self._repaid)

    @functools.cached_property
    def _repaid(self) -> int:
        """The number of steps that repay a measurement."""
        amx = self._device == "cuda" or bf16_instructions() == "amx_bf16"
        return REPAID_STEPS_AMX if amx else REPAID_STEPS

    def _is_time(self) -> bool:
        left = self._steps_left()
        if left is None:
            return self._steps >= self._repaid  # as many as there were
        if left < self._repaid:
            self._end(f"the {left:.0f} steps left do not repay a measurement")
        return not self.is_over

    def _agreed(self, decide: Callable[[], T]) -> T:
        """Return what rank 0 decides."""
        if self._broadcast is None:
            return decide()
        decided = self._broadcast((decide(), self.is_over, self.reason))
        answer, self.is_over, self.reason = decided
        return answer

    def _measure(self, calls: list[RecordedCall]) -> tuple[StepConfig, AutotuneResult] | None:
        every = [*self._ways, *self._others]
        seconds: dict[str, list[float]] = {}
        failure = ""
        try:
            measurement = StepBenchmark(self._parts, calls, self._device)
        except Exception as error:  # copies of modules raise what they like
            measurement, failure = None, one_line(error)
        for number in range(_ROUNDS):
            for way in every if number % 2 else reversed(every):
                if measurement is not None and (not number or way.name in seconds):
                    try:
                        taken = measurement.seconds(way, warm_up=not number)
                        seconds.setdefault(way.name, []).append(taken)
                    except Exception as error:  # one way may be impossible
                        seconds.pop(way.name, None)
                        failure = failure or one_line(error)
            if number == _TRIED - 1:
                names = self._agreed(lambda: _promising(seconds, self.plain.name))
                every = [way for way in every if way.name in names]
        del measurement
        choice = self._agreed(functools.partial(self._decided, seconds))
        if choice is None:
            self._end(f"it cannot be measured ({failure})")
            return None
        if not _rank() and choice.is_clear(self.plain.name):
            autotune.save_result(self._key, choice)
        return self._chosen(choice)

    def _decided(self, seconds: Mapping[str, Sequence[float]]) -> AutotuneResult | None:
        if self.plain.name not in seconds:
            return None
        return autotune.choose(seconds, self.plain.name, [way.name for way in self._ways])

    def _chosen(self, choice: AutotuneResult) -> tuple[StepConfig, AutotuneResult]:
        self._end("")
        faster = [way for way in self._others if way.name in choice.speedups]
        for other in faster[:1]:
            ratio = choice.speedups[other.name]
            if ratio.exceeds(max(autotune.LEAST_GAIN, choice.speedup.high)) and not _rank():
                chosen = self._way(choice.name)
                warnings.warn(
                    f"On this processor {other.name} trains this model {ratio:.2f} times as fast "
                    f"as {chosen.name if chosen else choice.name}, which precision= names; leave "
                    "precision out to let Nano choose",
                    stacklevel=2,
                )
        way = self._way(choice.name)
        assert way is not None
        return way, choice

    def _way(self, name: str) -> StepConfig | None:
        return next((way for way in self._ways if way.name == name), None)

    def _end(self, reason: str) -> None:
        self.is_over, self.reason = True, reason
        self._calls = None

    def _key_of(self, batch: object) -> str:
        module = self._parts[""]
        parameters = [
            (name, list(each.shape), str(each.dtype), each.requires_grad)
            for name, each in module.named_parameters()
        ]
        layers = [(name, type(part).__qualname__, part.extra_repr(), part.training)
                  for name, part in module.named_modules()]  # fmt: skip
        sizes = [
            (str(each.dtype), each.dim(), round(math.log2(max(each.numel(), 1))))
            for each in tree_leaves(batch)
            if isinstance(each, torch.Tensor)
        ]
        ways = [way.name for way in (*self._ways, *self._others)]
        world = torch.distributed.get_world_size() if _is_distributed() else 1
        facts = [parameters, layers, sizes, ways, self._device, torch.get_num_threads(), world]
        if self._device == "cuda":
            facts.append(torch.cuda.get_device_name())
        return autotune.cache_key("training step", facts, torch.__version__)


def _promising(seconds: Mapping[str, Sequence[float]], plain: str) -> list[str]:
    """Return the plain way, and the others that may be the fastest."""
    least = min((rounds[0] for rounds in seconds.values()), default=0.0)
    return [
        name for name, rounds in seconds.items() if name == plain or rounds[0] <= _CLOSE * least
    ]


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _is_distributed() else 0


class StepBenchmark:
    """Calls of a model's parts, computed by copies of these parts that nobody else sees.

    Parameters
    ----------
    parts : mapping of str to Module
    calls : list of RecordedCall
    device : {"cpu", "cuda"}

    Raises
    ------
    Exception
        If a part cannot be copied.
    """

    def __init__(self, parts: Mapping[str, nn.Module], calls: Sequence[RecordedCall], device: str):
        called = {call.part: parts[call.part] for call in calls}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._parts: dict[str, nn.Module] = copy.deepcopy(called)
        for part in self._parts.values():
            _forget_hooks(part)
            part.zero_grad(set_to_none=True)
        self._calls, self._device = calls, device

    def seconds(self, way: StepConfig, *, warm_up: bool) -> float:
        """Return the seconds of all calls, forwards and backwards.

        Parameters
        ----------
        way : StepConfig
        warm_up : bool
            Compute them once before, without measuring: kernels are chosen in a first call.
        """
        from bigdl.training.state import capture_rng, restore_rng

        layout = torch.channels_last if way.channels_last else torch.contiguous_format
        before = capture_rng()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for part in self._parts.values():
                    part.to(memory_format=layout)  # type: ignore[call-overload]
                if warm_up:
                    self._compute(way)
                self._wait()
                begin = time.perf_counter()
                self._compute(way)
                self._wait()
                return time.perf_counter() - begin
        finally:
            restore_rng(before)
            for part in self._parts.values():
                part.zero_grad(set_to_none=True)

    def _compute(self, way: StepConfig) -> None:
        for part in self._parts.values():
            part.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        with torch.enable_grad(), torch.autocast(self._device, torch.bfloat16, enabled=False):
            for call in self._calls:
                args, kwargs = tree_map_only(
                    torch.Tensor, functools.partial(_for, way), (call.args, call.kwargs)
                )
                with torch.autocast(self._device, torch.bfloat16, enabled=way.bf16):
                    output = self._parts[call.part](*args, **kwargs)
                outputs = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
                losses += [x.float().square().mean() for x in outputs if x.grad_fn is not None]
            if losses:
                torch.stack(losses).sum().backward()

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def _for(way: StepConfig, tensor: torch.Tensor) -> torch.Tensor:
    """Return an input as the part gets it: what another part gave is not in bfloat16 in float32."""
    if tensor.dtype == torch.bfloat16 and not way.bf16:
        tensor = tensor.float()
    return last(tensor) if way.channels_last else tensor


def last(tensor: torch.Tensor) -> torch.Tensor:
    """Return a batch of images with the channels last, another tensor as it is."""
    if tensor.dim() != 4 or tensor.layout != torch.strided:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def _forget_hooks(module: nn.Module) -> None:
    """Remove the hooks of a copy: they are the program's, which must not see its calls."""
    for part in module.modules():
        vars(part).pop("log", None)  # of a LightningModule in several processes
        for name in _HOOKS:
            vars(part)[name].clear()


def _copied(arguments: T) -> T:
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, copied, arguments)


class _Recorder:
    """Notes the outermost calls of a model's parts in training mode.

    It takes the place of their ``forward``: Lightning calls a module in several processes to run
    its ``training_step``, which is no call of ``forward``.
    """

    def __init__(self, parts: Mapping[str, nn.Module], calls: list[RecordedCall]):
        self.parts, self.calls, self.depth = parts, calls, 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        replaced = AttributePatch()
        for name, part in self.parts.items():
            replaced.set(part, "forward", _Recorded(part, self, name))
        try:
            yield
        finally:
            replaced.undo()


class _Recorded(ForwardOverride):
    """The forward of a part whose calls are noted."""

    def __init__(self, part: nn.Module, recorder: _Recorder, name: str):
        super().__init__(part)
        self.recorder, self.name = recorder, name

    def __call__(self, *args: object, **kwargs: object) -> object:
        recorder = self.recorder
        is_step = recorder.depth == 0 and torch.is_grad_enabled() and self.module.training
        if is_step and len(recorder.calls) < _MOST_CALLS:
            recorder.calls.append(RecordedCall(self.name, *_copied((args, kwargs))))
        recorder.depth += 1
        try:
            return self.forward(*args, **kwargs)
        finally:
            recorder.depth -= 1


def speed_in_words(way: StepConfig, plain: StepConfig, choice: AutotuneResult) -> str:
    """Return what was chosen, and by which ratio."""
    others = [
        (name, s) for name, s in choice.speedups.items() if name not in (way.name, plain.name)
    ]
    if way == plain:
        measured = ", ".join(f"{name} {s:.2f}" for name, s in others)
        return f"{way.name} (times as fast as it: {measured or 'nothing else'})"
    return f"{way.name} ({choice.speedup:.2f} times as fast as {plain.name})"
