"""Objects of encrypted files as a data set."""

from __future__ import annotations

import operator
import os
import pickle
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from bigdl.common.errors import UsageError
from bigdl.nano.pytorch.encryption.files import load, places

__all__ = ["EncryptedDataset"]


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
    >>> save([(x, y) for x, y in rows], "rows.pt", encryption_key=key)
    >>> loader = DataLoader(EncryptedDataset("rows.pt", key), batch_size=32, shuffle=True)
    """

    def __init__(self, data_path: str | os.PathLike, key: str | bytes):
        self.data_path = data_path
        self._key = key
        path = Path(data_path)
        self._places = [(file, place) for file in _files(path) for place in places(file)]
        if not self._places:
            raise UsageError(f"{path} holds no encrypted object; save some to it first")
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
            raise UsageError(f"{path}: {error}") from error
        except (pickle.UnpicklingError, RuntimeError) as error:
            raise UsageError(
                f"{path} holds an object that cannot be read safely; save tensors, numbers, texts, "
                "and lists, tuples and dicts of them"
            ) from error


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = (file for file in path.iterdir() if file.is_file())
        return sorted(file for file in files if not file.name.startswith("."))
    if not path.is_file():
        raise UsageError(f"There is no file or folder {path}; give the place of encrypted objects")
    return [path]
