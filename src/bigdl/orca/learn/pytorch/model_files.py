"""Files that hold a model: a state dict, the full state of BigDL 2.x, or a pickled module.

The full state has epoch, models, optimizers and schedulers.  A folder of ``model_dir`` (see
:mod:`bigdl.training.checkpoint`) is read too.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

from bigdl.common.errors import UsageError
from bigdl.training.checkpoint import Snapshot, read_bytes, read_checkpoint
from bigdl.training.position import Position
from bigdl.training.state import dumps, loads

__all__ = ["full_state", "read_model", "snapshot_of"]

_FULL = (("optimizers", "optimizer.pt"), ("schedulers", "scheduler.pt"))


def full_state(model, snapshot: Snapshot | None) -> dict[str, Any]:
    """Epoch and the states of model, optimizer and scheduler, as BigDL 2.x gave them."""
    files = {} if snapshot is None else snapshot.files
    epoch = 0 if snapshot is None else snapshot.position.counted
    state: dict[str, Any] = {"epoch": epoch, "models": [model.state_dict()]}
    for key, file in _FULL:
        if file in files:
            state[key] = [loads(files[file])]
    return state


def read_model(path: str, is_trusted: Callable[[bytes], bool]) -> tuple[Snapshot, Any]:
    """Read any of the files.

    Parameters
    ----------
    path : str
        A local path or fsspec URL.
    is_trusted : callable
        True if a file of these bytes may run code, as a pickled module can.

    Returns
    -------
    snapshot : Snapshot
    module : torch.nn.Module or None
        If the file held an entire module.
    """
    import torch

    snapshot = read_checkpoint(path)
    if snapshot is not None:
        return snapshot, None
    found, module = _unpickle(path, read_bytes(path), is_trusted), None
    if isinstance(found, torch.nn.Module):
        found, module = found.state_dict(), found
    if not isinstance(found, dict):
        raise UsageError(
            f"{path!r} holds a {type(found).__name__}; expected a state dict, a full state or an "
            "entire module"
        )
    return snapshot_of(found), module


def snapshot_of(found: dict) -> Snapshot:
    """The snapshot that a state dict or a full state stands for."""
    position, files = Position(), {}
    if isinstance(found.get("models"), list) and found["models"]:
        position.epoch = int(found.get("epoch", 0))
        for key, file in _FULL:
            if found.get(key):
                files[file] = dumps(found[key][0])
        found = found["models"][0]
    files["model.pt"] = dumps(found)
    return Snapshot(position.to_json(), files)


def _unpickle(path, data, is_trusted):
    import torch

    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if not data.startswith((b"PK", b"\x80")):  # neither torch's archive nor a pickle
            raise _damaged(path, "its content is something else") from error
        if not is_trusted(data):
            raise UsageError(
                f"{path!r} holds more than weights (an entire module, perhaps); loading it can run "
                "any code, so pass trust=True if you know where it comes from"
            ) from error
    except Exception as error:  # a damaged archive shows in many ways
        raise _damaged(path, error) from error
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:  # whatever the code in it raises
        raise _damaged(path, error) from error


def _damaged(path, reason):
    text = " ".join(str(reason).split())
    return UsageError(f"{path!r} is not a file that torch can load: {text}")
