"""Pickling by value, and unpickling that never runs untrusted code.

A pickle is a program: the writer of the file decides which code its reader runs.  BigDL 2.x signed
its pickles with a key in its public source, which protects nobody.  :class:`SafePickle` keeps the
names of 2.x.  It reads a pickle if the caller passes its digest, if it has plain data only, or if
the caller passes ``trust=True``.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import io
import pickle
import sys
import types
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

from bigdl.common.errors import UsageError
from bigdl.common.trust import digest_of
from bigdl.runtime import keras_objects

_TYPES = ("bytearray", "bytes", "complex", "frozenset", "range", "set", "slice")
_PLAIN = frozenset(
    [(module, name) for module in ("builtins", "__builtin__") for name in _TYPES]
    + [("collections", name) for name in ("Counter", "OrderedDict", "deque")]
    + [("datetime", name) for name in ("date", "datetime", "time", "timedelta", "timezone")]
    + [("_codecs", "encode")]  # bytes in the older protocols
    + [("decimal", "Decimal"), ("fractions", "Fraction"), ("uuid", "UUID")]
    + [("numpy", "dtype"), ("numpy", "ndarray")]
    + [(f"{core}.multiarray", "_reconstruct") for core in ("numpy.core", "numpy._core")]
    + [(f"{core}.multiarray", "scalar") for core in ("numpy.core", "numpy._core")]
    + [(f"{core}.numeric", "_frombuffer") for core in ("numpy.core", "numpy._core")]
)


class _PlainUnpickler(pickle.Unpickler):
    """Unpickler that accepts plain data types only."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _PLAIN:
            raise UsageError(
                f"The pickle holds a {module}.{name}, which is more than plain data; pass the "
                "digest that was returned when it was written, or trust=True if you "
                "know its writer",
                code="file-untrusted",
            )
        if module.startswith(("numpy.core.", "numpy._core.")):  # NumPy 2 moved it
            import numpy

            core = "numpy.core" if numpy.__version__.startswith("1.") else "numpy._core"
            module = f"{core}.{module.rpartition('.')[2]}"
        return super().find_class(module, name)

    def persistent_load(self, pid: object) -> NoReturn:
        raise UsageError(
            "The pickle refers to objects that are not in it and cannot be read",
            code="file-damaged",
        )


@functools.cache
def value_pickler() -> type:
    """Return a ``cloudpickle`` Pickler class that also pickles Keras objects by value.

    Code objects keep the file name that tracebacks show; cloudpickle drops it since 3.1.3.
    """
    import cloudpickle

    class ValuePickler(cloudpickle.Pickler):
        def reducer_override(self, value: object) -> object:
            if type(value) is not types.CodeType:
                reduction: Any = NotImplemented
                if "keras" in sys.modules or "tensorflow" in sys.modules:
                    reduction = keras_objects.reduce_keras_object(value)
                if reduction is NotImplemented:
                    return super().reducer_override(value)
                return reduction
            make, parts = self.dispatch_table[types.CodeType](value)
            named = [_file_of(value) if part == "<dynamic-code>" else part for part in parts]
            return make, tuple(named)

    return ValuePickler


def _file_of(code: types.CodeType) -> str:
    """Return a copy of a code object's file name, so that equal code has equal pickles."""
    return "".join(code.co_filename)


def dumps_by_value(value: object) -> bytes:
    """Pickle an object that may refer to lambdas or to classes of a notebook."""
    buffer = io.BytesIO()
    value_pickler()(buffer).dump(value)
    return buffer.getvalue()


def pickled_by_value(value: object, failure: str, advice: str) -> bytes:
    """Pickle an object by value; raise an error that names the part that cannot be pickled.

    Raises
    ------
    UsageError
        With `failure`, the reason and `advice`, if a part of it cannot be pickled.
    """
    try:
        return dumps_by_value(value)
    except Exception as error:
        name = _unpicklable_name(value)
        what = f"its {name}, which" if name else "something that"
        raise UsageError(
            f"{failure}, since it refers to {what} cannot be pickled ({error}); {advice}",
            code="model-copy",
        ) from error


def _unpicklable_name(value: object, depth: int = 6) -> str:
    """Return the name of the variable or attribute that cannot be pickled, or ""."""
    if depth == 0:
        return ""
    for part_type, name, part in _parts(value):
        try:
            value_pickler()(io.BytesIO()).dump(part)
        except Exception:
            inner = _unpicklable_name(part, depth - 1)
            return f"{inner} (of {name!r})" if inner else f"{part_type} {name!r}"
    return ""


def _parts(value: object) -> Iterator[tuple[str, str, Any]]:
    """Yield the type, name and value of each object that a function or object refers to."""
    if isinstance(value, functools.partial):
        yield from _parts(value.func)
        yield from (("argument", str(name), part) for name, part in enumerate(value.args))
        yield from (("argument", name, part) for name, part in value.keywords.items())
    elif isinstance(value, types.MethodType):
        yield from _parts(value.__self__)
    elif isinstance(value, types.FunctionType):
        # a pickled function has its cells, and the globals that its code names
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell
                yield "variable", name, cell.cell_contents
        if value.__module__ == "__main__":
            for name in value.__code__.co_names:
                if name in value.__globals__:
                    yield "variable", name, value.__globals__[name]
    elif isinstance(value, dict):
        yield from (("entry", str(name), part) for name, part in value.items())
    elif isinstance(value, list | tuple):
        yield from (("element", str(number), part) for number, part in enumerate(value))
    elif hasattr(value, "__dict__"):
        yield from (("attribute", name, part) for name, part in vars(value).items())


class SafePickle:
    """Variant of ``pickle`` that verifies data before unpickling it.

    Without a digest it reads plain data only: numbers, str, bytes, None, lists, tuples, dicts,
    sets, dates and numpy arrays of them.

    Examples
    --------
    >>> import io
    >>> from bigdl.orca import SafePickle
    >>> file = io.BytesIO()
    >>> digest = SafePickle.dump({"a": 1}, file, return_digest=True)
    >>> _ = file.seek(0)
    >>> SafePickle.load(file, digest)
    {'a': 1}
    """

    @classmethod
    def dump(
        cls, obj: object, file: BinaryIO, return_digest: bool = False, **kwargs: Any
    ) -> str | None:
        """Pickle an object into an open file.

        Parameters
        ----------
        obj : object
        file : binary file
        return_digest : bool, default False
        **kwargs
            Arguments of ``pickle.dumps``.

        Returns
        -------
        str or None
            With `return_digest`, the SHA-256 of the written bytes, in hexadecimal.  Keep it where
            other writers of the file cannot change it, to verify the file later.
        """
        data = pickle.dumps(obj, **kwargs)
        file.write(data)
        return digest_of(data) if return_digest else None

    @classmethod
    def dumps(
        cls,
        obj: object,
        return_digest: bool = False,
        **kwargs: Any,  # of `pickle.dumps`
    ) -> bytes | tuple[bytes, str]:
        """Pickle an object; return bytes, or (bytes, digest) with `return_digest`."""
        data = pickle.dumps(obj, **kwargs)
        return (data, digest_of(data)) if return_digest else data

    @classmethod
    def load(
        cls, file: BinaryIO, digest: str | None = None, *, trust: bool = False, **kwargs: Any
    ) -> Any:  # the pickled object
        """Unpickle an object from an open file; with a digest, read the whole file.

        Parameters
        ----------
        file : binary file
        digest : str, optional
            Result of :meth:`dump`; any object is read if the digest matches.
        trust : bool, default False
            Read any object, which may run any code; for files of a known writer.
        **kwargs
            Arguments of ``pickle.load``.

        Raises
        ------
        UsageError
            If the digest differs, or an object without a digest is no plain data.
        """
        if digest is not None:
            return cls.loads(file.read(), digest, trust=trust, **kwargs)
        return pickle.load(file, **kwargs) if trust else _PlainUnpickler(file, **kwargs).load()

    @classmethod
    def loads(
        cls, data: bytes, digest: str | None = None, *, trust: bool = False, **kwargs: Any
    ) -> Any:  # the pickled object
        """Unpickle bytes; see :meth:`load` for the parameters."""
        if digest is not None and not hmac.compare_digest(str(digest), digest_of(data)):
            raise UsageError(
                "The pickle does not match the digest: it was changed, or the "
                "digest is of BigDL 2.x; pass trust=True without a digest if you know its writer",
                code="file-untrusted",
            )
        return cls.load(io.BytesIO(data), trust=trust or digest is not None, **kwargs)
