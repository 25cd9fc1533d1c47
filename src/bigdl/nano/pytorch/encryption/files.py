"""``torch.save`` and ``torch.load`` with a key."""

from __future__ import annotations

import io
import os
import struct
from contextlib import nullcontext
from typing import Any

import torch

from bigdl.common.errors import UsageError, require

__all__ = ["load", "places", "save"]

_MARK = b"BigDL-encrypted\x01"
_SIZE = struct.Struct(">Q")
# The functions themselves: patch_encryption puts others in their places.
_torch_save, _torch_load = torch.save, torch.load


def save(obj: Any, f: Any, *args: Any, encryption_key: str | bytes | None = None, **kwargs: Any):
    """``torch.save``, encrypted if there is a key.

    Parameters
    ----------
    obj : object
    f : path or binary file
        Several objects may be written to one file object, one after the other.
    encryption_key : str or bytes, optional
        32 bytes in URL-safe base64.
    *args, **kwargs
        Of ``torch.save``.

    Raises
    ------
    UsageError
        If the key is no key of Fernet.
    """
    if encryption_key is None:
        _torch_save(obj, f, *args, **kwargs)
        return
    buffer = io.BytesIO()
    _torch_save(obj, buffer, *args, **kwargs)
    token = _fernet(encryption_key).encrypt(buffer.getvalue())
    with _opened(f, "wb") as file:
        file.write(_MARK + _SIZE.pack(len(token)) + token)


def load(f: Any, *args: Any, decryption_key: str | bytes | None = None, **kwargs: Any) -> Any:
    """``torch.load``, of a file that was encrypted.

    Parameters
    ----------
    f : path or binary file
        Of a file object the next object is read.
    decryption_key : str or bytes, optional
        Without it the file must not be encrypted.
    *args, **kwargs
        Of ``torch.load``; ``weights_only`` is as its default.

    Raises
    ------
    UsageError
        If the key is wrong or missing, or the file is not encrypted or was changed.
    """
    if decryption_key is None:
        if _is_encrypted(f):
            raise UsageError("The file is encrypted; pass its key as decryption_key")
        return _torch_load(f, *args, **kwargs)
    from cryptography.fernet import InvalidToken

    fernet = _fernet(decryption_key)
    with _opened(f, "rb") as file:
        if file.read(len(_MARK)) != _MARK:
            raise UsageError("The file is not encrypted; load it without decryption_key")
        (size,) = _SIZE.unpack(file.read(_SIZE.size).rjust(_SIZE.size, b"\0"))
        token = file.read(size)
    try:
        content = fernet.decrypt(token)
    except InvalidToken as error:
        raise UsageError(
            "The file cannot be decrypted: the key is not the one it was saved with, or the file "
            "was changed"
        ) from error
    return _torch_load(io.BytesIO(content), *args, **kwargs)


def places(path: str | os.PathLike) -> list[int]:
    """Where in a file the objects begin that :func:`save` has written to it, in bytes.

    Raises
    ------
    UsageError
        If there is something else in the file.
    """
    found = []
    with open(path, "rb") as file:
        while mark := file.read(len(_MARK)):
            header = file.read(_SIZE.size)
            if mark != _MARK or len(header) < _SIZE.size:
                raise UsageError(
                    f"{path} is no encrypted file; write it by torch.save(…, encryption_key=…) "
                    "after patch_encryption()"
                )
            found.append(file.tell() - len(mark) - len(header))
            file.seek(*_SIZE.unpack(header), os.SEEK_CUR)
    return found


def _fernet(key: str | bytes) -> Any:
    fernet = require("cryptography.fernet", "encryption")
    try:
        return fernet.Fernet(key)
    except (ValueError, TypeError) as error:
        raise UsageError(
            "The key must be 32 bytes in URL-safe base64; make one by "
            "cryptography.fernet.Fernet.generate_key()"
        ) from error


def _opened(f: Any, mode: str) -> Any:
    return open(f, mode) if isinstance(f, (str, os.PathLike)) else nullcontext(f)


def _is_encrypted(f: Any) -> bool:
    with _opened(f, "rb") as file:
        if not hasattr(file, "seek"):
            return False
        place = file.tell()
        found = file.read(len(_MARK)) == _MARK
        file.seek(place)
    return found
