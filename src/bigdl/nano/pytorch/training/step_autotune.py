"""Selection of precision and memory format of training steps by measurement on this processor.

The processor and the model determine whether float32 or bfloat16, and contiguous or channels-last
tensors are faster. If enough steps remain to repay a measurement, a copy of the model repeats calls
of the first step, forward and backward, in each configuration. In one process this happens when the
first step calls the model, so all steps of the fit use the selected configuration. If several parts
are called, or in several processes, the first step runs in the plain configuration and records the
calls, which are measured before the next step. A fit with fewer steps measures a part of the rows.
Weights, optimizers, normalization statistics, random numbers and the order of data are not
affected. The result is cached, and later fits of the same architecture on the same processor start
with it.
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
_TRIED = 2  # rounds after which slow configurations are dropped
_CLOSE = 1.15  # time relative to the fastest, below which a configuration stays
REPAID_STEPS = 800  # remaining steps that repay a measurement, which takes as long as about 20
REPAID_STEPS_AMX = 100  # fewer with AMX, which is likely to gain a multiple
SAMPLED_STEPS = 200  # as REPAID_STEPS, for a measurement of a part of the rows
SAMPLED_STEPS_AMX = 40
_SHARE = 4  # a quarter of the rows is measured then
_SAMPLED_ROUNDS = 3
_MAIN_PART = 0.9  # share of the parameters of a part whose calls stand for the whole step
_MOST_CALLS = 64  # recorded calls of parts in a step
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
    """Precision and memory format of a training step.

    Attributes
    ----------
    bf16 : bool
        Whether layers run in bfloat16 under autocast.
    channels_last : bool
        Whether images are stored with channels last.
    """

    bf16: bool
    channels_last: bool

    @property
    def name(self) -> str:
        precision = "bfloat16" if self.bf16 else "float32"
        return f"{precision} with channels_last" if self.channels_last else precision


class RecordedCall(NamedTuple):
    """Recorded call of a module or one of its children: its name and copies of the arguments."""

    part: str
    args: tuple
    kwargs: dict[str, Any]


def bf16_instructions(device: str = "cpu") -> str | None:
    """Return the processor's instruction set for bfloat16 multiplication, or None.

    An instruction set does not guarantee that bfloat16 is faster.
    """
    if device == "cuda":
        return "CUDA" if torch.cuda.is_bf16_supported(including_emulation=False) else None
    flags = isa_flags()
    return next((name for name in ("amx_bf16", "avx512_bf16", "bf16") if name in flags), None)


class StepAutotuner:
    """Autotuner that selects the fastest configuration of training steps by measurement.

    Parameters
    ----------
    parts : mapping of str to Module
        The trained module under the name "", and its direct children that compute.
    configs : sequence of StepConfig
        Candidates; the first is the plain configuration.
    others : sequence of StepConfig
        Further configurations to measure. A warning is given if one of them is faster.
    device : {"cpu", "cuda"}
    steps_left : callable
        Returns the number of remaining steps; None if unknown.
    broadcast : callable, optional
        Returns the value of rank 0; None in a single process.
    """

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        configs: Sequence[StepConfig],
        others: Sequence[StepConfig] = (),
        *,
        device: str = "cpu",
        steps_left: Callable[[], float | None] = lambda: None,
        broadcast: Callable[[Any], Any] | None = None,
    ):
        self._parts, self._configs, self._others = dict(parts), list(configs), list(others)
        self._device, self._steps_left, self._broadcast = device, steps_left, broadcast
        self._steps = 0
        self._key = ""
        self._calls: list[RecordedCall] | None = None
        self._is_sampled = False
        self.is_over = len(self._configs) + len(self._others) < 2
        self.reason = ""

    @property
    def plain(self) -> StepConfig:
        """Configuration of the first steps, the baseline of measurements."""
        return self._configs[0]

    @property
    def may_change_layout(self) -> bool:
        """True if the memory format may change within this step."""
        return self._selects_within_step and len({each.channels_last for each in self._configs}) > 1

    @property
    def _selects_within_step(self) -> bool:
        """True in the first step of a single process, which may measure when it calls the model."""
        return self._broadcast is None and self._steps == 1

    def begin(
        self, batch: object, *, possible: bool = True
    ) -> tuple[StepConfig, AutotuneResult] | None:
        """Select a configuration before a step, if a selection is due.

        Parameters
        ----------
        batch
            Batch of the step; its sizes are part of the cache key.
        possible : bool
            False while another component controls how parts of the model run.

        Returns
        -------
        tuple of StepConfig and AutotuneResult, or None
            The selection, returned once.
        """
        if self.is_over:
            return None
        self._steps += 1
        if self._steps == 1:
            if torch.are_deterministic_algorithms_enabled():
                self._end("a measurement depends on time, and the training is to be deterministic")
                return None
            self._key = self._cache_key(batch)
            kept = self._decide_on_rank_0(self._load)
            if kept is not None and self._config_named(kept.name) is not None:
                return self._chosen(kept)
            return None
        if self._calls is None:
            return None  # the previous step was not recorded
        calls, self._calls = self._calls, None
        if not possible or not calls:
            self._end("the layers are not called as modules" if possible else "")
            return None
        return self._measure(calls)

    @contextlib.contextmanager
    def observed(
        self, apply: Callable[[StepConfig, AutotuneResult], object] | None = None
    ) -> Iterator[None]:
        """Context manager of a step that measures or records module calls if that is due.

        Parameters
        ----------
        apply : callable, optional
            Called within the step with the selection, before the model computes. Without it, and in
            several processes, :meth:`begin` returns the selection before the next step.
        """
        if not self._is_due or not self._decide_on_rank_0(self._is_time):
            yield
            return
        calls: list[RecordedCall] = []
        recorder = _Recorder(self._parts, calls)
        if apply is not None and self._selects_within_step:
            recorder.on_main_call = functools.partial(self._select_now, apply)
        with recorder.recording():
            yield
        if not self.is_over:
            self._calls = calls

    def _select_now(
        self, apply: Callable[[StepConfig, AutotuneResult], object], call: RecordedCall
    ) -> StepConfig:
        """Measure a call of the model's main part and apply the selection."""
        chosen = self._measure([call])
        if chosen is None:
            return self.plain
        apply(*chosen)
        return chosen[0]

    def _load(self) -> AutotuneResult | None:
        """Return the cached result; for a short fit also that of a part of the rows."""
        kept = autotune.load_result(self._key)
        if kept is None and (self._steps_left() or math.inf) < self._repaid:
            kept = autotune.load_result(self._sampled_key)
        return kept

    @property
    def _sampled_key(self) -> str:
        return autotune.cache_key(self._key, "part of the rows")

    def observe(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Record the arguments of a module call if candidates are measured after this step."""
        if self._is_due and self._decide_on_rank_0(self._is_time):
            self._calls = [RecordedCall("", *_clone_tensors((args, kwargs)))]

    @property
    def _is_due(self) -> bool:
        """True in steps in which all ranks decide whether to measure."""
        return not self.is_over and self._steps in (1, self._repaid)

    @functools.cached_property
    def _repaid(self) -> int:
        """Number of steps that must remain for a measurement of all rows to pay off."""
        return REPAID_STEPS_AMX if self._has_amx else REPAID_STEPS

    @property
    def _has_amx(self) -> bool:
        """True if bfloat16 is likely to gain a multiple."""
        return self._device == "cuda" or bf16_instructions() == "amx_bf16"

    def _is_time(self) -> bool:
        left = self._steps_left()
        if left is None:
            return self._steps >= self._repaid  # guess: as many steps remain
        self._is_sampled = left < self._repaid
        if left < min(self._repaid, SAMPLED_STEPS_AMX if self._has_amx else SAMPLED_STEPS):
            self._end(f"the {left:.0f} steps left do not repay a measurement")
        return not self.is_over

    def _decide_on_rank_0(self, decide: Callable[[], T]) -> T:
        """Return the decision of rank 0 in all ranks."""
        if self._broadcast is None:
            return decide()
        decided = self._broadcast((decide(), self.is_over, self.reason))
        answer, self.is_over, self.reason = decided
        return answer

    def _measure(self, calls: list[RecordedCall]) -> tuple[StepConfig, AutotuneResult] | None:
        every = [*self._configs, *self._others]
        seconds: dict[str, list[float]] = {}
        failure = ""
        rounds = _SAMPLED_ROUNDS if self._is_sampled else _ROUNDS
        if self._is_sampled:
            calls = [_first_rows(call) for call in calls]
        try:
            measurement = StepBenchmark(self._parts, calls, self._device)
        except Exception as error:  # copying a module may raise anything
            measurement, failure = None, one_line(error)
        for number in range(rounds):
            for config in every if number % 2 else reversed(every):
                if measurement is not None and (not number or config.name in seconds):
                    try:
                        taken = measurement.seconds(config, warm_up=not number)
                        seconds.setdefault(config.name, []).append(taken)
                    except Exception as error:  # a configuration may be unsupported
                        seconds.pop(config.name, None)
                        failure = failure or one_line(error)
            if number == (0 if self._is_sampled else _TRIED - 1):
                names = self._decide_on_rank_0(lambda: _promising(seconds, self.plain.name))
                every = [config for config in every if config.name in names]
        del measurement
        choice = self._decide_on_rank_0(functools.partial(self._decided, seconds))
        if choice is None:
            self._end(f"it cannot be measured ({failure})")
            return None
        if not _rank() and choice.is_clear(self.plain.name):
            autotune.save_result(self._sampled_key if self._is_sampled else self._key, choice)
        return self._chosen(choice)

    def _decided(self, seconds: Mapping[str, Sequence[float]]) -> AutotuneResult | None:
        if self.plain.name not in seconds:
            return None
        return autotune.choose(seconds, self.plain.name, [config.name for config in self._configs])

    def _chosen(self, choice: AutotuneResult) -> tuple[StepConfig, AutotuneResult]:
        self._end("")
        faster = [config for config in self._others if config.name in choice.speedups]
        for other in faster[:1]:
            ratio = choice.speedups[other.name]
            if ratio.exceeds(max(autotune.LEAST_GAIN, choice.speedup.high)) and not _rank():
                chosen = self._config_named(choice.name)
                warnings.warn(
                    f"On this processor {other.name} trains this model {ratio:.2f} times as fast "
                    f"as {chosen.name if chosen else choice.name}, which precision= names; leave "
                    "precision out to let Nano choose",
                    stacklevel=2,
                )
        config = self._config_named(choice.name)
        assert config is not None
        return config, choice

    def _config_named(self, name: str) -> StepConfig | None:
        return next((config for config in self._configs if config.name == name), None)

    def _end(self, reason: str) -> None:
        self.is_over, self.reason = True, reason
        self._calls = None

    def _cache_key(self, batch: object) -> str:
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
        configs = [config.name for config in (*self._configs, *self._others)]
        world = torch.distributed.get_world_size() if _is_distributed() else 1
        facts = [parameters, layers, sizes, configs, self._device, torch.get_num_threads(), world]
        if self._device == "cuda":
            facts.append(torch.cuda.get_device_name())
        return autotune.cache_key("training step", facts, torch.__version__)


def _promising(seconds: Mapping[str, Sequence[float]], plain: str) -> list[str]:
    """Return the baseline and the configurations that are nearly as fast as the fastest."""
    least = min((rounds[0] for rounds in seconds.values()), default=0.0)
    return [
        name for name, rounds in seconds.items() if name == plain or rounds[0] <= _CLOSE * least
    ]


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _rank() -> int:
    return torch.distributed.get_rank() if _is_distributed() else 0


class StepBenchmark:
    """Benchmark that repeats recorded calls on private copies of the called modules.

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
            _remove_hooks(part)
            part.zero_grad(set_to_none=True)
        self._calls, self._device = calls, device

    def seconds(self, config: StepConfig, *, warm_up: bool) -> float:
        """Return the duration of all recorded calls, forward and backward, in seconds.

        Parameters
        ----------
        config : StepConfig
        warm_up : bool
            True to run the calls once before timing; the first call selects kernels.
        """
        from bigdl.training.state import capture_rng, restore_rng

        layout = torch.channels_last if config.channels_last else torch.contiguous_format
        before = capture_rng()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for part in self._parts.values():
                    part.to(memory_format=layout)  # type: ignore[call-overload]
                if warm_up:
                    self._compute(config)
                self._wait()
                begin = time.perf_counter()
                self._compute(config)
                self._wait()
                return time.perf_counter() - begin
        finally:
            restore_rng(before)
            for part in self._parts.values():
                part.zero_grad(set_to_none=True)

    def _compute(self, config: StepConfig) -> None:
        for part in self._parts.values():
            part.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        with torch.enable_grad(), torch.autocast(self._device, torch.bfloat16, enabled=False):
            for call in self._calls:
                args, kwargs = tree_map_only(
                    torch.Tensor,
                    functools.partial(_prepare_input, config),
                    (call.args, call.kwargs),
                )
                with torch.autocast(self._device, torch.bfloat16, enabled=config.bf16):
                    output = self._parts[call.part](*args, **kwargs)
                outputs = [x for x in tree_leaves(output) if isinstance(x, torch.Tensor)]
                losses += [x.float().square().mean() for x in outputs if x.grad_fn is not None]
            if losses:
                torch.stack(losses).sum().backward()

    def _wait(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def _prepare_input(config: StepConfig, tensor: torch.Tensor) -> torch.Tensor:
    """Convert a tensor to a configuration's memory format, and bfloat16 to float32 if necessary."""
    if tensor.dtype == torch.bfloat16 and not config.bf16:
        tensor = tensor.float()
    return to_channels_last(tensor) if config.channels_last else tensor


def to_channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """Convert a batch of images to channels last; return other tensors unchanged."""
    if tensor.dim() != 4 or tensor.layout != torch.strided:
        return tensor
    return tensor.contiguous(memory_format=torch.channels_last)


def _remove_hooks(module: nn.Module) -> None:
    """Remove the hooks of a copied module, so that benchmark calls do not run the user's hooks."""
    for part in module.modules():
        vars(part).pop("log", None)  # set on a LightningModule in several processes
        for name in _HOOKS:
            vars(part)[name].clear()


def _clone_tensors(arguments: T) -> T:
    def copied(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, copied, arguments)


def _first_rows(call: RecordedCall) -> RecordedCall:
    """Return a call with a part of the rows; the whole call if its rows are not recognized."""
    tensors = [x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, torch.Tensor)]
    rows = max((len(tensor) for tensor in tensors if tensor.dim()), default=0)
    if rows < 2 * _SHARE:
        return call

    def first(tensor: torch.Tensor) -> torch.Tensor:
        is_batch = tensor.dim() > 0 and len(tensor) == rows
        return tensor[: rows // _SHARE] if is_batch else tensor

    args, kwargs = tree_map_only(torch.Tensor, first, (call.args, call.kwargs))
    return RecordedCall(call.part, args, kwargs)


class _Recorder:
    """Recorder of the outermost calls of a model's children in training mode.

    It replaces their ``forward`` instead of using hooks: in several processes Lightning calls the
    module to run its ``training_step``, which would run the module's hooks.
    """

    on_main_call: Callable[[RecordedCall], StepConfig] | None = None
    """Called instead of the recording if the first call is that of the main part."""

    def __init__(self, parts: Mapping[str, nn.Module], calls: list[RecordedCall]):
        self.parts, self.calls, self.depth = parts, calls, 0
        self._replaced = AttributePatch()

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        for name, part in self.parts.items():
            self._replaced.set(part, "forward", _RecordedForward(part, self, name))
        try:
            yield
        finally:
            self.stop()

    def stop(self) -> None:
        """Restore the ``forward`` methods."""
        self._replaced.undo()

    def is_main_call(self, name: str) -> bool:
        """Return True if this is the first call, and of the part with nearly all parameters."""
        if self.on_main_call is None or self.calls:
            return False
        sizes = [
            sum(weight.numel() for weight in self.parts[each].parameters()) for each in (name, "")
        ]
        return sizes[0] >= _MAIN_PART * sizes[1]


class _RecordedForward(ForwardOverride):
    """Forward method of a child module that records its calls."""

    def __init__(self, part: nn.Module, recorder: _Recorder, name: str):
        super().__init__(part)
        self.recorder, self.name = recorder, name

    def __call__(self, *args: object, **kwargs: object) -> object:
        recorder = self.recorder
        is_step = recorder.depth == 0 and torch.is_grad_enabled() and self.module.training
        if is_step and recorder.is_main_call(self.name):
            return self._select(args, kwargs)
        if is_step and len(recorder.calls) < _MOST_CALLS:
            recorder.calls.append(RecordedCall(self.name, *_clone_tensors((args, kwargs))))
        recorder.depth += 1
        try:
            return self.forward(*args, **kwargs)
        finally:
            recorder.depth -= 1

    def _select(self, args: tuple, kwargs: dict[str, object]) -> object:
        """Select the configuration of all steps with this call, and make the call in it."""
        recorder, select = self.recorder, self.recorder.on_main_call
        assert select is not None
        recorder.stop()
        config = select(RecordedCall(self.name, *_clone_tensors((args, kwargs))))
        if config.channels_last:
            args, kwargs = tree_map_only(torch.Tensor, to_channels_last, (args, kwargs))
        return self.module.forward(*args, **kwargs)


def describe_speed(config: StepConfig, plain: StepConfig, choice: AutotuneResult) -> str:
    """Describe the selected configuration and its speed-up."""
    others = [
        (name, s) for name, s in choice.speedups.items() if name not in (config.name, plain.name)
    ]
    if config == plain:
        measured = ", ".join(f"{name} {s:.2f}" for name, s in others)
        return f"{config.name} (times as fast as it: {measured or 'nothing else'})"
    return f"{config.name} ({choice.speedup:.2f} times as fast as {plain.name})"
