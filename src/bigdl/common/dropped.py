"""Import errors for dropped modules of BigDL 2.x and for packages of missing extras.

The error of a dropped module names its replacement. A finder raises it for modules of packages that
exist. Dropped top-level packages such as ``bigdl.chronos`` are files with one statement that call
:func:`refuse`.
"""

import dis
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import NoReturn

from bigdl.common import missing
from bigdl.common.errors import UsageError

__all__ = [
    "DROPPED",
    "DroppedModuleError",
    "DroppedNameError",
    "explain_imports",
    "refuse",
    "refuse_name",
]

_LAYERS = "its layers were written in Scala"
_GRAPHS = "it ran graphs of TensorFlow 1"
_IN_KERAS = "bigdl.orca.learn.tf2 with Keras 3, or bigdl.orca.learn.pytorch"
_BACKENDS = "one Estimator trains on every backend"
_FROM_TORCH = "Estimator.from_torch of bigdl.orca.learn.pytorch"
_FROM_KERAS = "Estimator.from_keras of bigdl.orca.learn.tf2"
_IN_TORCH = "torch.nn with bigdl.orca.learn.pytorch, or Keras 3 with bigdl.orca.learn.tf2"

# The reason and the replacement; each entry includes its submodules.
DROPPED = {
    "bigdl.orca.tfpark": (_GRAPHS, _IN_KERAS),
    "bigdl.orca.learn.tf": (_GRAPHS, _IN_KERAS),
    "bigdl.orca.learn.bigdl": (_LAYERS, 'bigdl.orca.learn.pytorch with backend="bigdl"'),
    "bigdl.orca.learn.mpi": (
        "it needed Plasma, which Arrow has removed",
        'bigdl.orca.learn.pytorch with backend="spark"',
    ),
    "bigdl.orca.learn.pytorch.experimential": (
        "it ran runners of MMCV 1",
        "Estimator.from_torch of bigdl.orca.learn.pytorch with a MainCallback",
    ),
    "bigdl.orca.learn.pytorch.training_operator": (
        "steps belong to the loop",
        "a MainCallback of bigdl.orca.learn.pytorch.callbacks",
    ),
    "bigdl.orca.learn.pytorch.pytorch_ray_worker": (_BACKENDS, f'{_FROM_TORCH} with backend="ray"'),
    "bigdl.orca.learn.pytorch.pytorch_ray_estimator": (
        _BACKENDS,
        f'{_FROM_TORCH} with backend="ray"',
    ),
    "bigdl.orca.learn.pytorch.pytorch_pyspark_worker": (
        _BACKENDS,
        f'{_FROM_TORCH} with backend="spark"',
    ),
    "bigdl.orca.learn.pytorch.pytorch_pyspark_estimator": (
        _BACKENDS,
        f'{_FROM_TORCH} with backend="spark"',
    ),
    "bigdl.orca.learn.tf2.ray_estimator": (_BACKENDS, f'{_FROM_KERAS} with backend="ray"'),
    "bigdl.orca.learn.tf2.pyspark_estimator": (_BACKENDS, f'{_FROM_KERAS} with backend="spark"'),
    "bigdl.dllib.keras": (_LAYERS, _IN_TORCH),
    "bigdl.dllib.models": (_LAYERS, _IN_TORCH),
    "bigdl.dllib.estimator": (
        _LAYERS,
        "bigdl.orca.learn.pytorch, or NNEstimator of bigdl.dllib.nnframes",
    ),
    "bigdl.dllib.optim": (_LAYERS, "bigdl.orca.learn.optimizers and bigdl.orca.learn.trigger"),
    "bigdl.dllib.feature.dataset": (_LAYERS, "Spark DataFrames, or XShards of bigdl.orca.data"),
    "bigdl.dllib.feature.image": ("it called OpenCV in the JVM", "bigdl.orca.data.image"),
    "bigdl.dllib.feature.text": (_LAYERS, "XShards of bigdl.orca.data"),
    "bigdl.chronos": (
        "its models of time series are not a part of this version",
        "bigdl.orca.learn.pytorch, or Trainer of bigdl.nano.pytorch",
    ),
    "bigdl.serving": ("it ran on Flink", "bigdl.nano.serving, or bigdl.friesian.serving"),
    "bigdl.llm.serving": ("it was a worker of FastChat", "bigdl-serve, by the OpenAI protocol"),
    "bigdl.llm.ggml": ("it loaded native GGML libraries", "TextModel of bigdl.llm"),
    "bigdl.llm.models": ("it loaded native GGML libraries", "TextModel of bigdl.llm"),
    "bigdl.ppml": (
        "it needed enclaves of SGX and a service of keys",
        "encrypted connections of bigdl.orca (spark.network.crypto.enabled)",
    ),
    "bigdl.dllib.net": (
        _LAYERS,
        "InferenceModel of bigdl.orca.inference, or TorchModel of bigdl.orca.torch",
    ),
    "bigdl.dllib.inference": (
        "it ran models in the JVM",
        "InferenceModel of bigdl.orca.inference",
    ),
    "bigdl.dllib.utils.tf": (_GRAPHS, "InferenceModel of bigdl.orca.inference with ONNX"),
}


_ESTIMATORS = "bigdl.orca.learn.pytorch (PyTorch) or bigdl.orca.learn.tf2 (Keras)"

# Names that users try, and the modules that have them.
MOVED_NAMES = {
    "bigdl.friesian.FeatureTable": "bigdl.friesian.feature",
    "bigdl.nano.InferenceOptimizer": "bigdl.nano.pytorch or bigdl.nano.tf.keras",
    "bigdl.nano.Trainer": "bigdl.nano.pytorch",
    "bigdl.nano.keras": "bigdl.nano.tf.keras",
    "bigdl.nano.tensorflow": "bigdl.nano.tf.keras",
    "bigdl.nano.torch": "bigdl.nano.pytorch",
    "bigdl.orca.AutoEstimator": "bigdl.orca.automl.auto_estimator",
    "bigdl.orca.Estimator": _ESTIMATORS,
    "bigdl.orca.XShards": "bigdl.orca.data",
    "bigdl.orca.learn.Estimator": _ESTIMATORS,
    "bigdl.orca.learn.keras": "bigdl.orca.learn.tf2",
    "bigdl.orca.learn.tensorflow": "bigdl.orca.learn.tf2",
    "bigdl.orca.learn.torch": "bigdl.orca.learn.pytorch",
    "bigdl.orca.pytorch": "bigdl.orca.learn.pytorch",
    "bigdl.orca.tensorflow": "bigdl.orca.learn.tf2",
}


class ModuleElsewhereError(UsageError, ModuleNotFoundError):
    """Raised when a name is imported from a wrong package; the message names the right package."""

    code = "name-dropped"


class DroppedModuleError(UsageError, ModuleNotFoundError):
    """Raised when a dropped module of BigDL 2.x is imported; the message names its replacement.

    Examples
    --------
    >>> import bigdl.orca
    >>> from bigdl.common.dropped import DroppedModuleError
    >>> try:
    ...     import bigdl.orca.learn.mpi
    ... except DroppedModuleError as error:  # programs may catch ModuleNotFoundError
    ...     print(error)
    bigdl.orca.learn.mpi is no longer available: it needed Plasma, which Arrow has removed;
    use bigdl.orca.learn.pytorch with backend="spark" instead
    """

    code = "name-dropped"


class DroppedNameError(UsageError, AttributeError):
    """Raised when a dropped name of BigDL 2.x is read from a module; the message says why.

    It is an AttributeError, so that ``hasattr`` and ``getattr`` with a default work.

    Examples
    --------
    >>> from bigdl.dllib.utils import common
    >>> hasattr(common, "JTensor"), getattr(common, "JTensor", None)
    (False, None)
    """

    code = "name-dropped"


class _DroppedImportError(UsageError, ImportError):
    """Raised when ``from module import name`` imports a dropped name of BigDL 2.x."""

    code = "name-dropped"


def is_imported_by_name(depth: int) -> bool:
    """Return True if a module's attribute is read by ``from module import name``.

    That statement keeps an ImportError of the module's ``__getattr__``, but replaces the text of an
    AttributeError, which ``hasattr`` needs.

    Parameters
    ----------
    depth : int
        Calls between this function and that statement; 1 from ``__getattr__`` itself.
    """
    caller = sys._getframe(depth + 1)
    is_running = caller.f_lasti >= 0
    return is_running and dis.opname[caller.f_code.co_code[caller.f_lasti]] == "IMPORT_FROM"


def refuse_name(module: str, name: str, why: str) -> NoReturn:
    """Raise the error for a dropped name; call it in the ``__getattr__`` of a module.

    Parameters
    ----------
    module : str
        ``__name__`` of the module.
    name : str
    why : str
        End of the sentence, with the replacement.

    Raises
    ------
    DroppedNameError
        If the attribute is read.
    ImportError
        If the name is imported by ``from module import name``.
    """
    error_class = _DroppedImportError if is_imported_by_name(2) else DroppedNameError
    raise error_class(f"{module}.{name} is no longer available: {why}")


def refuse(name: str) -> NoReturn:
    """Raise :class:`DroppedModuleError` for a module of ``DROPPED``."""
    why, instead = DROPPED[name]
    raise DroppedModuleError(f"{name} is no longer available: {why}; use {instead} instead")


class _MissingModules(MetaPathFinder):
    """Last module finder, which raises helpful errors for imports that no other finder resolves."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: object = None) -> None:
        if fullname in DROPPED:  # a parent is imported before its modules
            refuse(fullname)
        if fullname in MOVED_NAMES:
            raise ModuleElsewhereError(f"There is no {fullname}; import {_import_hint(fullname)}")
        if fullname in missing.PACKAGES:
            later = sys.meta_path[sys.meta_path.index(self) + 1 :]  # packages add further finders
            if not any(finder.find_spec(fullname, path, None) for finder in later):
                missing.refuse(fullname)


def _import_hint(name: str) -> str:
    """Return the correct import for a name that has moved to another package."""
    last = name.rpartition(".")[2]
    return f"{last} from {MOVED_NAMES[name]}" if last[0].isupper() else MOVED_NAMES[name]


def explain_imports() -> None:
    """Install the module finder that explains failed imports.

    It covers dropped modules, names of another package, and packages of extras that a module of
    BigDL imports.
    """
    if not any(isinstance(finder, _MissingModules) for finder in sys.meta_path):
        sys.meta_path.append(_MissingModules())
