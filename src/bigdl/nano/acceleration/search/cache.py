"""Results of earlier searches, by a digest of all that they depend on.

Without a directory, the last few are kept as long as the process lives, so that a cell of a
notebook can be run again. With one they stay, each in a directory named by its key.

The digest answers "is this the same model on the same data as last time?", also across
processes. Objects are written by :mod:`pickle` into a hash, with their classes and functions
replaced by a digest of their code, and tensors by one of their bytes. Whatever makes a digest
differ without a reason costs a search, no more.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import sys
import tempfile
from collections import OrderedDict
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.nano.acceleration.search.results import Results

# Packages whose classes and functions are known by their names, as their versions are digested.
_LIBRARIES = {"torch", "numpy", "pandas", "pytorch_lightning", "lightning", "torchmetrics"}


def fingerprint(*objects: Any) -> str | None:
    """A digest of some objects.

    Parameters
    ----------
    *objects
        Anything.

    Returns
    -------
    str or None
        Hexadecimal; None if one of them cannot be pickled.
    """
    target = _Hash()
    try:
        _Pickler(target).dump(objects)
    except Exception:
        return None
    return target.digest.hexdigest()


class _Hash:
    """A file that keeps the digest of what is written to it only."""

    def __init__(self):
        self.digest = hashlib.blake2b(digest_size=20)

    def write(self, data) -> int:
        self.digest.update(data)
        return len(data)


class _Pickler(pickle.Pickler):
    def __init__(self, file):
        super().__init__(file, protocol=5)
        self._seen: set[int] = set()

    def reducer_override(self, value):
        if isinstance(value, (type, FunctionType)):
            return self._code_of(value)
        if isinstance(value, ModuleType):
            return str, (value.__name__,)
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor):
            return str, (_tensor_digest(value),)
        if torch is not None and isinstance(value, torch.Generator):
            return str, ("generator",)
        return NotImplemented

    def _code_of(self, value):
        name = f"{value.__module__}:{value.__qualname__}"
        package = str(value.__module__).partition(".")[0]
        if package in _LIBRARIES or package in sys.stdlib_module_names - {"__main__"}:
            return NotImplemented if _is_importable(value) else (str, (name,))
        if id(value) in self._seen:
            return str, (name,)
        self._seen.add(id(value))
        if isinstance(value, type):
            members = sorted(vars(value).items())
            parts = [(key, _functions_in(member)) for key, member in members]
            parts = [(key, functions) for key, functions in parts if functions]
            return tuple, ([name, value.__bases__, parts],)
        return tuple, ([name, *self._parts_of(value)],)

    def _parts_of(self, function: FunctionType) -> list:
        cells = [_content(cell) for cell in function.__closure__ or ()]
        names = sorted(_names_in(function.__code__) & set(function.__globals__))
        # functions and classes of the same module that it calls, and plain values that it reads
        used = [
            (name, function.__globals__[name])
            for name in names
            if getattr(function.__globals__[name], "__module__", None) == function.__module__
            or isinstance(function.__globals__[name], (bool, int, float, str))
        ]
        code = _code_digest(function.__code__)
        return [code, function.__defaults__, function.__kwdefaults__, cells, used]


def _functions_in(member: Any) -> list[FunctionType]:
    member = getattr(member, "__func__", member)  # of a staticmethod or a classmethod
    functions = (member.fget, member.fset) if isinstance(member, property) else (member,)
    return [each for each in functions if isinstance(each, FunctionType)]


def _is_importable(value) -> bool:
    known: Any = sys.modules.get(value.__module__)
    for part in value.__qualname__.split("."):
        known = getattr(known, part, None)
    return known is value


def _content(cell):
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return None


def _names_in(code: CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names |= _names_in(constant)
    return names


def _code_digest(code: CodeType) -> str:
    digest = hashlib.blake2b(code.co_code, digest_size=20)
    digest.update(repr((code.co_names, code.co_varnames)).encode())
    for constant in code.co_consts:
        text = _code_digest(constant) if isinstance(constant, CodeType) else _constant(constant)
        digest.update(text.encode())
    return digest.hexdigest()


def _constant(value) -> str:
    # the order of a set differs from process to process
    return repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value)


def _tensor_digest(tensor) -> str:
    import torch

    plain = tensor.detach().cpu()
    head = f"{plain.dtype} {tuple(plain.shape)} {plain.layout} {tensor.requires_grad}"
    if plain.layout != torch.strided or plain.is_quantized:
        raise pickle.PicklingError("a tensor without plain bytes")
    content = plain.contiguous().reshape(-1).view(torch.uint8).numpy()
    return head + hashlib.blake2b(content.data, digest_size=20).hexdigest()


_MOST = 4
_of_this_process: OrderedDict[str, Results] = OrderedDict()


class Cache:
    """Results of earlier searches.

    Parameters
    ----------
    directory : str, path or None
        None: in this process only.
    """

    def __init__(self, directory: str | os.PathLike | None):
        self._directory = None if directory is None else Path(directory)

    def find(self, key: str | None) -> Results | None:
        """Return the results of an equal search, or None."""
        if key is None:
            return None
        if self._directory is not None:
            return Results.read(self._directory / key)
        if key in _of_this_process:
            _of_this_process.move_to_end(key)
        return _of_this_process.get(key)

    def new_directory(self) -> Path:
        """Return an empty directory for the models of a search."""
        try:
            if self._directory is not None:
                self._directory.mkdir(parents=True, exist_ok=True)
            return Path(tempfile.mkdtemp(prefix="bigdl-nano-optimize-", dir=self._directory))
        except OSError as error:
            raise UsageError(
                f"No directory can be made in cache_dir {self._directory}: {error.strerror}"
            ) from error

    def put(self, key: str | None, results: Results) -> None:
        """Keep results."""
        if key is None:
            return
        if self._directory is not None:
            results.keep(self._directory / key)
            return
        _of_this_process[key] = results
        while len(_of_this_process) > _MOST:
            _of_this_process.popitem(last=False)
