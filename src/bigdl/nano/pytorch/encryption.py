"""Encrypted PyTorch files that can only be read or changed with a key.

Encryption uses Fernet from the package ``cryptography``: AES in CBC mode with an HMAC. A changed
file or a wrong key raises an error before anything is unpickled. Create a key with
``cryptography.fernet.Fernet.generate_key()``.
"""

from __future__ import annotations

import io
import operator
import os
import pickle
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import torch
from torch.utils.data import Dataset

from bigdl.common.errors import UsageError, require

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from cryptography.fernet import Fernet

__all__ = ["EncryptedDataset", "load", "save"]

_MARK = b"BigDL-encrypted\x01"
_SIZE = struct.Struct(">Q")
# The original functions, which patch_encryption replaces.
_torch_save, _torch_load = torch.save, torch.load


def save(
    obj: object,
    f: str | os.PathLike | BinaryIO,
    *args: Any,
    encryption_key: str | bytes | None = None,
    **kwargs: Any,
) -> None:
    """Save an object with ``torch.save``, encrypted if a key is given.

    Parameters
    ----------
    obj : object
    f : path or binary file
        Path or file object. Several objects can be written to one file object in sequence.
    encryption_key : str or bytes, optional
        Key of 32 bytes in URL-safe base64.
    *args, **kwargs
        Arguments of ``torch.save``.

    Raises
    ------
    UsageError
        If the key is not a valid Fernet key.

    Examples
    --------
    >>> import torch
    >>> from cryptography.fernet import Fernet
    >>> from bigdl.nano.pytorch.encryption import load, save
    >>> key = Fernet.generate_key()
    >>> save(torch.nn.Linear(2, 1).state_dict(), "model.pt", encryption_key=key)
    >>> list(load("model.pt", decryption_key=key))
    ['weight', 'bias']
    """
    if encryption_key is None:
        _torch_save(obj, f, *args, **kwargs)
        return
    buffer = io.BytesIO()
    _torch_save(obj, buffer, *args, **kwargs)
    token = _fernet(encryption_key).encrypt(buffer.getvalue())
    with _opened(f, "wb") as file:
        file.write(_MARK + _SIZE.pack(len(token)) + token)


def load(
    f: str | os.PathLike | BinaryIO,
    *args: Any,
    decryption_key: str | bytes | None = None,
    **kwargs: Any,
) -> Any:  # any content
    """Load an object with ``torch.load``, decrypted if a key is given.

    Parameters
    ----------
    f : path or binary file
        Path or file object. From a file object, the next object is read. A ``BytesIO`` at its end,
        for example after writing, is read from the start.
    decryption_key : str or bytes, optional
        Key of the file; required if the file is encrypted.
    *args, **kwargs
        Arguments of ``torch.load``, with the same defaults.

    Raises
    ------
    UsageError
        If the key is wrong or missing, or the file is not encrypted or has changed.

    Examples
    --------
    >>> import torch
    >>> from cryptography.fernet import Fernet
    >>> from bigdl.nano.pytorch.encryption import load, save
    >>> key = Fernet.generate_key()
    >>> save(torch.arange(3), "numbers.pt", encryption_key=key)
    >>> load("numbers.pt", decryption_key=key)
    tensor([0, 1, 2])
    >>> load("numbers.pt")
    Traceback (most recent call last):
        ...
    bigdl.common.errors.UsageError: The file is encrypted; pass its key as decryption_key
    """
    if isinstance(f, io.BytesIO) and f.tell() == len(f.getbuffer()):
        f.seek(0)
    if decryption_key is None:
        if _is_encrypted(f):
            raise UsageError(
                "The file is encrypted; pass its key as decryption_key",
                code="argument-missing",
                argument="decryption_key",
            )
        return _torch_load(f, *args, **kwargs)
    from cryptography.fernet import InvalidToken

    fernet = _fernet(decryption_key)
    with _opened(f, "rb") as file:
        size = _token_size(file)
        if size is None:
            raise UsageError(
                "The file is not encrypted; load it without decryption_key",
                code="argument-conflict",
                argument="decryption_key",
            )
        token = file.read(size)
    try:
        content = fernet.decrypt(token)
    except InvalidToken as error:
        raise UsageError(
            "The file cannot be decrypted: the key is not the one it was saved with, or the file "
            "was changed",
            code="argument-value",
            argument="decryption_key",
        ) from error
    return _torch_load(io.BytesIO(content), *args, **kwargs)


def _offsets(path: str | os.PathLike) -> list[int]:
    """Return the byte offsets of the encrypted objects in a file.

    Raises
    ------
    UsageError
        If the file has other content.
    """
    offsets, end = [], os.path.getsize(path)
    with open(path, "rb") as file:
        while file.tell() < end:
            offsets.append(file.tell())
            size = _token_size(file)
            if size is None:
                raise UsageError(
                    f"{path} is not an encrypted file; write it with torch.save(…, "
                    "encryption_key=…) after patch_encryption()",
                    code="file-format",
                    path=str(path),
                )
            file.seek(size, os.SEEK_CUR)
    return offsets


def _token_size(file: BinaryIO) -> int | None:
    """Read the header of an encrypted object; return its size, or None if there is no header."""
    mark, size = file.read(len(_MARK)), file.read(_SIZE.size)
    return _SIZE.unpack(size)[0] if mark == _MARK and len(size) == _SIZE.size else None


def _fernet(key: str | bytes) -> Fernet:
    fernet = require("cryptography.fernet", "encryption")
    try:
        return fernet.Fernet(key)
    except (ValueError, TypeError) as error:
        raise UsageError(
            "The key must be 32 bytes in URL-safe base64; create one with "
            "cryptography.fernet.Fernet.generate_key()",
            code="argument-value",
            argument="key",
        ) from error


def _opened(f: object, mode: str) -> AbstractContextManager[Any]:
    return open(f, mode) if isinstance(f, (str, os.PathLike)) else nullcontext(f)


def _is_encrypted(f: object) -> bool:
    with _opened(f, "rb") as file:
        if not hasattr(file, "seek"):
            return False
        offset = file.tell()
        is_encrypted = file.read(len(_MARK)) == _MARK
        file.seek(offset)
    return is_encrypted


class EncryptedDataset(Dataset):
    """Dataset of the objects in an encrypted file, or in a folder of encrypted files.

    Files are written by :func:`bigdl.nano.pytorch.encryption.save`, which is ``torch.save`` after
    :func:`bigdl.nano.pytorch.patching.patch_encryption`. The path is one of

    * a file with a list, whose elements are the items,
    * a file with several objects written in sequence, which are the items,
    * a folder of such files in the order of their names, without hidden files. In a folder, a list
      is one item.

    Objects are decrypted on access, in each worker of a DataLoader; the elements of a list are
    decrypted at construction and kept in memory. Objects must be readable by ``torch.load(…,
    weights_only=True)``: tensors, numbers, strings, and lists, tuples and dicts of them.

    Parameters
    ----------
    data_path : str or path
        Path of the file or folder.
    key : str or bytes
        Key used for saving.

    Raises
    ------
    UsageError
        If the file does not exist, is not encrypted or is empty, or the key is wrong. On access of
        an item, if its file has changed or contains an unsafe object.

    Examples
    --------
    >>> import torch
    >>> from cryptography.fernet import Fernet
    >>> from bigdl.nano.pytorch.encryption import EncryptedDataset, save
    >>> key = Fernet.generate_key()
    >>> save([(torch.ones(2), 0), (torch.zeros(2), 1)], "rows.pt", encryption_key=key)
    >>> dataset = EncryptedDataset("rows.pt", key)
    >>> len(dataset), dataset[1]
    (2, (tensor([0., 0.]), 1))
    >>> loader = torch.utils.data.DataLoader(dataset, batch_size=2, shuffle=True)
    """

    def __init__(self, data_path: str | os.PathLike, key: str | bytes):
        self.data_path = data_path
        self._key = key
        path = Path(data_path)
        self._locations = [(file, offset) for file in _files(path) for offset in _offsets(file)]
        if not self._locations:
            raise UsageError(
                f"{path} holds no encrypted object; save some to it first",
                code="data-empty",
                path=str(path),
            )
        first = self._read(0)  # raises now if the key is wrong
        is_list = path.is_file() and len(self._locations) == 1 and isinstance(first, list)
        self._list = cast("list[Any]", first) if is_list else None

    def __len__(self) -> int:
        return len(self._locations if self._list is None else self._list)

    def __getitem__(self, index: int) -> Any:  # any content
        """Return the item at an index; negative indices count from the end."""
        position = range(len(self))[operator.index(index)]
        return self._read(position) if self._list is None else self._list[position]

    def _read(self, number: int) -> object:
        path, offset = self._locations[number]
        try:
            with open(path, "rb") as file:
                file.seek(offset)
                return load(file, decryption_key=self._key, weights_only=True)
        except UsageError as error:
            raise error.with_message(f"{path}: {error}") from error
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise UsageError(
                f"{path} holds an object that cannot be read safely; save tensors, numbers, texts, "
                "and lists, tuples and dicts of them",
                code="file-untrusted",
                path=str(path),
            ) from error


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = (file for file in path.iterdir() if file.is_file())
        return sorted(file for file in files if not file.name.startswith("."))
    if not path.is_file():
        raise UsageError(
            f"There is no file or folder {path}; pass the path of encrypted objects",
            code="path-missing",
            path=str(path),
        )
    return [path]
