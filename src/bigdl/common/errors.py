"""The exception classes of BigDL and helpers for error messages.

Every error that a user can cause is a :class:`UsageError`. It is both a ``RuntimeError`` and a
``ValueError``, so programs for any version of BigDL 2.x, which raised either, keep catching it.
Its text is one sentence: what was wrong, what was given, what to do.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType, TracebackType
from typing import Any, Self, TypeVar

from bigdl.common.program_state import preserve_program_state
from bigdl.common.telemetry import imported_without_telemetry, turn_off

T = TypeVar("T")

__all__ = [
    "BigDLError",
    "JobStopped",
    "LazyModule",
    "MissingExtraError",
    "UsageError",
    "UserFramesOnly",
    "WorkerError",
    "WorkerLost",
    "as_usage_error",
    "check_installed",
    "first_line",
    "hide_frames",
    "one_line",
    "raise_first_usage_error",
    "require",
    "short_traceback",
    "type_name",
    "user_stacklevel",
    "value_or_usage_error",
    "without_passwords",
]

_LONGEST_LINE = 300
_PASSWORD = re.compile(
    r"((?:[A-Za-z][A-Za-z0-9+.\-]*:{1,2}|(?<![\w:/]))//[^\s/@:'\"]*:)(?!\d+/)[^\s'\"]*?@(?![^\s/'\"]*@)"
)
_TOKEN = re.compile(r"(https?://)[^\s/@:'\"]+@")
_PARAMETER = re.compile(
    r"((?:[?&;#](?:password|passwd|pwd|sig|(?:access|api)_?key|secret_?(?:access_?)?key|"
    r"(?:[a-z]+[_-]){0,3}(?:secret|token|signature|password))|\b(?:AccountKey|SharedAccess(?:Key|Signature)))=)"
    r"[^\s&;'\"]+",
    re.IGNORECASE,
)
_TRACEBACK = "Traceback (most recent call last):"
_CAUSE = "The above exception was the direct cause of the following exception:"
_INSTALLED = re.compile(
    r"[\\/](site-packages|dist-packages)[\\/]|[\\/]lib[\\/]python3\.\d+[\\/]|<frozen "
)
_LIBRARY = re.compile(
    _INSTALLED.pattern
    + r"|[\\/]bigdl[\\/](common|data|dllib|friesian|mlflow|nano|orca|runtime|training|tuning)[\\/]"
)
"""Matches files of the standard library, installed packages and BigDL."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_FULL = "BIGDL_FULL_TRACEBACK"
_CALLED = ("__init__", "__call__", "__getitem__", "__iter__", "__next__", "__enter__")


class BigDLError(Exception):
    """Base class of every exception that BigDL raises on purpose.

    Parameters
    ----------
    *args
        The message.
    code : str, optional
        One of :data:`~bigdl.common.error_codes.CODES`; the class has a default.
    **facts
        Subjects of the message, such as ``column=`` or ``path=``, for programs that react to them.
        Numbers, strings and lists of them are kept; other objects become the name of their type.

    Attributes
    ----------
    code : str
        Stable name of the error; the message may change between versions.
    facts : dict
        Facts by name; each fact is also an attribute.

    Examples
    --------
    >>> from bigdl.common.errors import BigDLError
    >>> from bigdl.orca.automl import hp
    >>> try:
    ...     hp.uniform(2, 1)
    ... except BigDLError as error:  # whatever BigDL itself refuses, and what workers report
    ...     print(type(error).__name__)
    UsageError
    """

    code: str = "usage"

    def __init__(self, *args: object, code: str | None = None, **facts: object):
        args = tuple(without_passwords(each) if isinstance(each, str) else each for each in args)
        super().__init__(*args)
        if code is not None:
            self.code = code
        self.facts = {name: _plain(value) for name, value in facts.items()}

    def __getattr__(self, name: str) -> Any:  # a fact of the error, of any type
        try:
            return self.__dict__["facts"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}") from None


def without_passwords(text: str) -> str:
    """Replace the passwords, tokens and signatures of URLs in a text with ``***``.

    Examples
    --------
    >>> from bigdl.common.errors import without_passwords
    >>> without_passwords("'redis://app:s3cret@host:6379/0' cannot be used")
    "'redis://app:***@host:6379/0' cannot be used"
    """
    if "@" in text:
        text = _TOKEN.sub(r"\1***@", _PASSWORD.sub(r"\1***@", text))
    return _PARAMETER.sub(r"\1***", text) if "=" in text else text


def _plain(value: object) -> object:
    """Convert an error's fact (a keyword of :class:`BigDLError`) to a plain picklable value."""
    if isinstance(value, str):
        return without_passwords(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, bytes):
        return repr(value)
    return type_name(value)


class UsageError(BigDLError, RuntimeError, ValueError):
    """Raised when the caller requests something impossible; the message says what to do instead.

    Examples
    --------
    >>> from bigdl.common.errors import UsageError
    >>> from bigdl.orca.learn.trigger import SeveralIteration
    >>> try:
    ...     SeveralIteration(0)
    ... except UsageError as error:  # programs of BigDL 2.x catch ValueError or RuntimeError
    ...     print(error)
    ...     print(error.code, error.given)
    interval of SeveralIteration should be a positive integer, got 0
    argument-value 0
    >>> issubclass(UsageError, ValueError), issubclass(UsageError, RuntimeError)
    (True, True)
    """

    def with_message(self, message: str) -> UsageError:
        """Return an error with the same code and facts but a different message."""
        return UsageError(message, code=self.code, **self.facts)


class MissingExtraError(UsageError, ImportError):
    """Raised when an optional dependency is missing; the message has the ``pip install`` line.

    Examples
    --------
    >>> from bigdl.common.errors import MissingExtraError
    >>> from bigdl.orca.data.file import exists
    >>> try:
    ...     exists("oss://bucket/data.csv")  # a storage whose driver is not installed
    ... except MissingExtraError as error:
    ...     print(error)
    'oss://bucket/data.csv' needs a driver for oss:// that is not installed; run: pip install ossfs
    """

    code = "package-missing"


class WorkerError(BigDLError, RuntimeError):
    """Raised when user code raised an exception inside a worker.

    Attributes
    ----------
    rank : int
        Rank of the worker that failed first.
    kind : str
        Class name of the original exception.
    traceback : str
        The worker's traceback, as text. The message has only the frames of the user's code, see
        :func:`short_traceback`.
    original : BaseException or None
        The exception, if it is known.
    place : str
        Description of the process that raised it, as in the message.

    Examples
    --------
    >>> from bigdl.common.errors import WorkerError
    >>> from bigdl.orca.engine import LocalEngine
    >>> try:
    ...     LocalEngine().run(lambda worker: 1 / 0)
    ... except WorkerError as error:
    ...     print(error.kind, "in worker", error.rank)
    ZeroDivisionError in worker 0
    """

    code = "worker-error"

    def __init__(
        self,
        rank: int,
        error_type: str,
        traceback: str,
        original: BaseException | None = None,
        location: str = "",
    ):
        self.rank = rank
        self.kind = error_type
        self.traceback = traceback
        self.original = original
        self.place = location or f"worker {rank}"
        super().__init__(f"{error_type} in {self.place}:\n{short_traceback(traceback)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self.kind, self.traceback, None, self.place)

    def as_original(self, location: str) -> Exception:
        """Return the user's exception with its origin as a note, or this error if unavailable."""
        if not isinstance(self.original, Exception):
            return self
        self.original.add_note(f"{location}:\n{short_traceback(self.traceback)}")
        return self.original


class WorkerLost(BigDLError, RuntimeError):
    """Raised when a worker process or its host is lost (killed, out of memory, preempted).

    Attributes
    ----------
    is_counted : bool
        Whether the failure policy of the call has counted the loss already.

    Examples
    --------
    >>> import os, signal
    >>> from bigdl.common.errors import WorkerLost
    >>> from bigdl.orca.engine import LocalEngine
    >>> try:
    ...     LocalEngine().run(lambda worker: os.kill(os.getpid(), signal.SIGKILL))
    ... except WorkerLost as error:  # as the out-of-memory killer of Linux does
    ...     print("lost")
    lost
    """

    code = "worker-lost"
    is_counted = False


class JobStopped(BigDLError, RuntimeError):
    """Raised when a job is stopped on request; no worker was lost and nothing is retried.

    Examples
    --------
    >>> import time
    >>> from bigdl.common.errors import JobStopped
    >>> from bigdl.orca.engine import LocalEngine
    >>> def stop(worker):  # request the end of all workers, with a reason
    ...     worker.channel.set("abort", "the budget is spent")
    ...     time.sleep(60)
    >>> try:
    ...     LocalEngine().run(stop)
    ... except JobStopped as error:
    ...     print(error)
    The job was stopped: the budget is spent
    """

    code = "job-stopped"


def short_traceback(text: str) -> str:
    """Return a traceback without the frames before the user's code.

    Frames of the last exception count from the first one outside of BigDL, the standard library and
    installed packages. The result has the first of them and the last three, without marks below
    the code. Without such a frame it has the last four.

    Parameters
    ----------
    text : str
        A traceback as Python prints it; other texts are returned as they are.
    """
    before, head, block = text.rstrip().rpartition(_TRACEBACK)
    if not head:
        return text.rstrip()
    frames: list[list[str]] = []
    lines = block.strip("\n").split("\n")
    while lines and lines[0].startswith("  "):
        line = lines.pop(0)
        if line.startswith('  File "'):
            frames.append([])
        if frames and line.strip(" ~^"):
            frames[-1].append(line)
    first = next((n for n, frame in enumerate(frames) if not _LIBRARY.search(frame[0])), None)
    frames = frames[-4:] if first is None else frames[first:]
    if len(frames) > 4:
        frames = [frames[0], ["  ..."], *frames[-3:]]
    shown = [line for frame in frames for line in frame]
    cause, is_cause, _ = before.rstrip().rpartition(_CAUSE)
    if is_cause:
        lines.append(f"caused by {cause.rstrip().rpartition(chr(10))[2]}")
    return "\n".join([_TRACEBACK, *shown, *lines])


class UserFramesOnly:
    """Context manager that removes the frames before the user's code from exceptions.

    The traceback then begins with the first frame outside of BigDL, the standard library and
    installed packages. Without such a frame it has the last four.
    """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None or isinstance(error, BigDLError):
            if isinstance(error, WorkerError):  # its text has the frames
                error.__traceback__ = None
            return
        frames = _entries(traceback)
        first = next((n for n, each in enumerate(frames) if _is_users(each)), None)
        error.__traceback__ = frames[max(0, len(frames) - 4) if first is None else first]


def _entries(traceback: TracebackType | None) -> list[TracebackType]:
    """Return the entries of a traceback, the outermost call first."""
    entries = []
    while traceback is not None:
        entries.append(traceback)
        traceback = traceback.tb_next
    return entries


def _is_users(entry: TracebackType) -> bool:
    """Return True unless the frame is of BigDL, the standard library or an installed package."""
    file = entry.tb_frame.f_code.co_filename
    return not file.startswith(_PACKAGE) and not _INSTALLED.search(file)


def hide_frames(target: T) -> T:
    """Remove the frames of libraries from errors that a public function or class raises.

    The traceback of a :class:`BigDLError` then has the user's lines and the message only. Causes
    that no line of the user raised are hidden too: ``__context__`` has them. With the environment
    variable ``BIGDL_FULL_TRACEBACK=1`` tracebacks are complete.

    Parameters
    ----------
    target : function or type
        A function, or a class, whose public methods and properties are replaced.

    Returns
    -------
    function or type
        The function with the same signature, or the class.
    """
    if isinstance(target, type):
        for name, value in list(vars(target).items()):
            if name.startswith("_") and name not in _CALLED:
                continue
            if isinstance(value, staticmethod | classmethod):
                setattr(target, name, type(value)(hide_frames(value.__func__)))
            elif isinstance(value, property) and value.fget is not None:
                setattr(target, name, value.getter(hide_frames(value.fget)))
            elif inspect.isfunction(value):
                setattr(target, name, hide_frames(value))
        return target
    if not callable(target) or inspect.isgeneratorfunction(target):
        return target
    function: Callable[..., object] = target

    @functools.wraps(function)
    def call(*args: object, **kwargs: object) -> object:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            _trim(error)
            raise

    return call  # type: ignore[return-value]


def _trim(error: Exception) -> None:
    """Remove the frames of libraries from an error of BigDL, and one frame from other errors."""
    if os.environ.get(_FULL, "0") not in ("", "0"):
        return
    if not isinstance(error, BigDLError):
        if error.__traceback__ is not None:
            error.__traceback__ = error.__traceback__.tb_next  # the frame of `call`
        return
    error.__traceback__ = _user_frames(error.__traceback__)
    shown: BaseException = error
    while shown.__cause__ is not None:
        cause = shown.__cause__
        cause.__traceback__ = _user_frames(cause.__traceback__)
        if cause.__traceback__ is None:  # the message has the reason
            shown.__cause__, shown.__context__ = None, cause
            break
        shown = cause
    context = shown.__context__
    if context is not None and _user_frames(context.__traceback__) is None:
        shown.__suppress_context__ = True


def _user_frames(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback with only the frames of the user's code, or None without one."""
    users = None
    for each in reversed(_entries(traceback)):
        if _is_users(each):
            users = TracebackType(users, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return users


def user_stacklevel() -> int:
    """Return the ``stacklevel`` with which a warning names the first caller outside BigDL."""
    frame, level = sys._getframe(1), 1
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("bigdl."):
        frame, level = frame.f_back, level + 1  # type: ignore[assignment]
    return level


def type_name(value: object) -> str:
    """Return the name of a value's type with its package, such as ``pandas.DataFrame``."""
    value_type = type(value)
    package = value_type.__module__.partition(".")[0]
    name = value_type.__name__
    return name if package == "builtins" else f"{package}.{name}"


def one_line(error: BaseException) -> str:
    """Return an exception's class name and text in one line."""
    if isinstance(error, WorkerError):  # the error of the other process
        return _shortened(error.traceback.rstrip().rpartition("\n")[2])
    text = " ".join(str(error).split())
    return _shortened(f"{type(error).__name__}: {text}" if text else type(error).__name__)


def first_line(error: BaseException) -> str:
    """Return the first non-empty line of an exception's text, or its class name."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), type(error).__name__)[:_LONGEST_LINE]


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_LINE else text[: _LONGEST_LINE - 1] + "…"


@contextlib.contextmanager
def as_usage_error(
    sentence: str,
    advice: str = "",
    *,
    code: str = "usage",
    text: Callable[[Any], str] = one_line,
    **facts: object,
) -> Iterator[None]:
    """Context manager that converts exceptions to a UsageError; a UsageError passes unchanged.

    Parameters
    ----------
    sentence : str
        Begin of the message: the operation that failed.
    advice : str
        End of the message, after the reason.
    code : str
        Code of the error.
    **facts
        Facts of the error.
    text : callable
        Returns the reason of an exception as text.
    """
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{sentence}: {text(error)}{advice}", code=code, **facts) from error


def value_or_usage_error(function: Callable[..., T], *arguments: object) -> T | UsageError:
    """Return a function's value, or the UsageError that it raised."""
    try:
        return function(*arguments)
    except UsageError as error:
        return error


def raise_first_usage_error(outcomes: Iterable[Any]) -> list[Any]:
    """Return the results of :func:`value_or_usage_error`, or raise the first UsageError in them."""
    outcomes = list(outcomes)
    for outcome in outcomes:
        if isinstance(outcome, UsageError):
            raise outcome
    return outcomes


def require(module: str, extra: str) -> ModuleType:
    """Import an optional dependency; raise an error with the install command if it is missing.

    Parameters
    ----------
    module : str
        Dotted name of the module, e.g. ``"pyspark.sql"``.
    extra : str
        Name of the extra of the ``bigdl`` distribution that installs it.

    Returns
    -------
    module

    Raises
    ------
    MissingExtraError
        If the top-level package of `module` is not installed.
    """
    package = module.partition(".")[0]
    if package in ("keras", "tensorflow"):
        from bigdl.common.environment import quiet_tensorflow

        quiet_tensorflow()
    try:
        with _importing(package) if module not in sys.modules else contextlib.nullcontext():
            imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"{package} is not installed; run: pip install 'bigdl[{extra}]'",
            package=package,
            extra=extra,
        ) from error
    turn_off(package)
    return imported


def check_installed(extra: str, *packages: str) -> None:
    """Raise an error if a dependency of a BigDL package is not installed.

    Parameters
    ----------
    extra : str
        Names of the extras of the ``bigdl`` distribution that install them, separated by commas.
    *packages : str

    Raises
    ------
    MissingExtraError
        For the first missing package.
    """
    for package in packages:
        if sys.modules.get(package) is None and importlib.util.find_spec(package) is None:
            raise MissingExtraError(
                f"{package} is not installed; run: pip install 'bigdl[{extra}]'",
                package=package,
                extra=extra,
            )


@contextlib.contextmanager
def _importing(package: str) -> Iterator[None]:
    """Context manager for importing a dependency without side effects and without telemetry.

    This also hides tqdm's warning in a notebook without ipywidgets.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(preserve_program_state())
        stack.enter_context(imported_without_telemetry(package))
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "IProgress not found")
        if package in ("keras", "tensorflow"):
            from bigdl.common.environment import suppress_import_logs

            stack.enter_context(suppress_import_logs())
        if package in ("torchao", "neural_compressor", "transformers"):
            # hides messages about GPU libraries that cannot be loaded and about torch's API
            for logger in map(logging.getLogger, ("torchao", "torch.utils._pytree")):
                stack.callback(logger.setLevel, logger.level)
                logger.setLevel(logging.ERROR)
        yield


class LazyModule:
    """An optional dependency that is imported when an attribute is first read.

    Parameters
    ----------
    module, extra : str
        Arguments of :func:`require`, whose error is raised if the module is missing.
    """

    def __init__(self, module: str, extra: str):
        self._required = module, extra

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._required

    def __getattr__(self, name: str) -> Any:  # an attribute of the module
        return getattr(require(*self._required), name)
