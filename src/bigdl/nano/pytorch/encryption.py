"""Files of PyTorch that only the holder of a key can read or change.

The encryption is Fernet of the package ``cryptography``: AES in CBC mode with an HMAC, so a file
that was changed, or a wrong key, is an error and nothing of it is unpickled. A key comes from
``cryptography.fernet.Fernet.generate_key()``.
"""

import io
import operator
import os
import pickle
import struct
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import torch
from torch.utils.data import Dataset

from bigdl.common.errors import UsageError, require

if TYPE_CHECKING:
    from cryptography.fernet import Fernet

__all__ = ["EncryptedDataset", "load", "save"]

_MARK = b"BigDL-encrypted\x01"
_SIZE = struct.Struct(">Q")
# The functions themselves: patch_encryption puts others in their places.
_torch_save, _torch_load = torch.save, torch.load


def save(
    obj: object,
    f: str | os.PathLike | BinaryIO,
    *args: Any,
    encryption_key: str | bytes | None = None,
    **kwargs: Any,
) -> None:
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
) -> Any:
    """``torch.load``, of a file that was encrypted.

    Parameters
    ----------
    f : path or binary file
        Of a file object the next object is read; a ``BytesIO`` at its end, as one that was just
        written, is read from the beginning.
    decryption_key : str or bytes, optional
        Without it the file must not be encrypted.
    *args, **kwargs
        Of ``torch.load``; ``weights_only`` is as its default.

    Raises
    ------
    UsageError
        If the key is wrong or missing, or the file is not encrypted or was changed.

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
    """Return the offsets of the objects that :func:`save` has written to a file, in bytes.

    Raises
    ------
    UsageError
        If there is something else in the file.
    """
    offsets, end = [], os.path.getsize(path)
    with open(path, "rb") as file:
        while file.tell() < end:
            offsets.append(file.tell())
            size = _token_size(file)
            if size is None:
                raise UsageError(
                    f"{path} is no encrypted file; write it by torch.save(…, encryption_key=…) "
                    "after patch_encryption()",
                    code="file-format",
                    path=str(path),
                )
            file.seek(size, os.SEEK_CUR)
    return offsets


def _token_size(file: BinaryIO) -> int | None:
    """Read the header of an encrypted object; return the size of what follows, None without one."""
    mark, size = file.read(len(_MARK)), file.read(_SIZE.size)
    return _SIZE.unpack(size)[0] if mark == _MARK and len(size) == _SIZE.size else None


def _fernet(key: str | bytes) -> "Fernet":
    fernet = require("cryptography.fernet", "encryption")
    try:
        return fernet.Fernet(key)
    except (ValueError, TypeError) as error:
        raise UsageError(
            "The key must be 32 bytes in URL-safe base64; make one by "
            "cryptography.fernet.Fernet.generate_key()",
            code="argument-value",
            argument="key",
        ) from error


def _opened(f: object, mode: str) -> Any:
    return open(f, mode) if isinstance(f, (str, os.PathLike)) else nullcontext(f)


def _is_encrypted(f: object) -> bool:
    with _opened(f, "rb") as file:
        if not hasattr(file, "seek"):
            return False
        place = file.tell()
        is_encrypted = file.read(len(_MARK)) == _MARK
        file.seek(place)
    return is_encrypted


class EncryptedDataset(Dataset):
    """The objects that an encrypted file, or the encrypted files of a folder, hold.

    Files are those of :func:`bigdl.nano.pytorch.encryption.save`, which is ``torch.save`` after
    :func:`bigdl.nano.pytorch.patching.patch_encryption`. They are one of

    * a file with a list: its elements are the items,
    * a file to which several objects were written, one after the other: they are the items,
    * a folder of such files, in the order of their names; hidden files do not count. Here a list
      is one item, too.

    Objects are decrypted when they are asked for, in each worker of a DataLoader, but for the
    elements of a list, which are kept in memory. They are what ``torch.load(…,
    weights_only=True)`` reads: tensors, numbers, texts, and lists, tuples and dicts of them.

    Parameters
    ----------
    data_path : str or path
        The file or the folder.
    key : str or bytes
        What it was saved with.

    Raises
    ------
    UsageError
        If there is no such file, it is not encrypted or empty, or the key is another; when an item
        is asked for, if its file was changed or holds an object of another kind.

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
        self._places = [(file, place) for file in _files(path) for place in _offsets(file)]
        if not self._places:
            raise UsageError(
                f"{path} holds no encrypted object; save some to it first",
                code="data-empty",
                path=str(path),
            )
        first = self._read(0)  # a key that is wrong is refused now
        is_list = path.is_file() and len(self._places) == 1 and isinstance(first, list)
        self._list = first if is_list else None

    def __len__(self) -> int:
        return len(self._places if self._list is None else self._list)

    def __getitem__(self, index: int) -> Any:
        """An item; negative places count from the end."""
        place = range(len(self))[operator.index(index)]
        return self._read(place) if self._list is None else self._list[place]

    def _read(self, number: int) -> Any:
        path, place = self._places[number]
        try:
            with open(path, "rb") as file:
                file.seek(place)
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
            f"There is no file or folder {path}; give the place of encrypted objects",
            code="path-missing",
            path=str(path),
        )
    return [path]
