"""Packages of extras that are not installed: what their import by a module of BigDL says.

Modules import their dependencies by plain statements. Where one is missing, the finder of
:mod:`bigdl.common.dropped`, which is asked for what no other one has, calls :func:`refuse`.
"""

import functools
import re
import sys

from bigdl.common.errors import MissingExtraError

__all__ = ["PACKAGES", "MissingPackageError", "refuse"]

PACKAGES = {
    "PIL": "Pillow",
    "cmaes": "cmaes",
    "confluent_kafka": "confluent-kafka",
    "cryptography": "cryptography",
    "cv2": "opencv-python-headless",
    "deltalake": "deltalake",
    "elasticsearch": "elasticsearch",
    "faiss": "faiss-cpu",
    "fsspec": "fsspec",
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "httptools": "httptools",
    "jax": "jax",
    "keras": "keras",
    "lightning_fabric": "pytorch-lightning",
    "matplotlib": "matplotlib",
    "mlflow": "mlflow-skinny",
    "nncf": "nncf",
    "numpy": "numpy",
    "onnx": "onnx",
    "onnxruntime": "onnxruntime",
    "onnxscript": "onnxscript",
    "openvino": "openvino",
    "optuna": "optuna",
    "orjson": "orjson",
    "pandas": "pandas",
    "prometheus_client": "prometheus-client",
    "psutil": "psutil",
    "pyarrow": "pyarrow",
    "pyiceberg": "pyiceberg",
    "pyspark": "pyspark",
    "pytorch_lightning": "pytorch-lightning",
    "ray": "ray",
    "redis": "redis",
    "requests": "requests",
    "sklearn": "scikit-learn",
    "tensorflow": "tensorflow",
    "tf2onnx": "tf2onnx",
    "torch": "torch",
    "torchao": "torchao",
    "torchmetrics": "torchmetrics",
    "tqdm": "tqdm",
    "turbojpeg": "PyTurboJPEG",
    "uvicorn": "uvicorn",
    "uvloop": "uvloop",
    "xgboost": "xgboost",
    "xxhash": "xxhash",
    "yaml": "PyYAML",
}
"""What extras bring, by the names that are imported."""

# The extras that a room is installed with, by the longest name.
_OF_ROOMS = {
    "bigdl.data": "data",
    "bigdl.dllib": "orca",
    "bigdl.friesian": "friesian",
    "bigdl.friesian.serving": "serving",
    "bigdl.mlflow": "mlflow",
    "bigdl.nano": "nano",
    "bigdl.nano.automl.tf": "nano,tf",
    "bigdl.nano.serving": "serving",
    "bigdl.nano.tf": "nano,tf",
    "bigdl.orca": "orca",
    "bigdl.orca.automl": "automl",
}
# Where several bring a package that the room's own does not.
_FIRST = ["orca", "nano", "tf", "ray", "automl", "serving"]


class MissingPackageError(MissingExtraError, ModuleNotFoundError):
    """A package is not installed; code that goes on without it may catch ModuleNotFoundError."""


def refuse(package: str) -> None:
    """Raise an error if a module of BigDL is importing a package that extras bring.

    It returns where somebody else imports it, whom BigDL's extras do not concern. It is called by
    a finder of modules.

    Parameters
    ----------
    package : str
        A name of ``PACKAGES``.

    Raises
    ------
    MissingExtraError
        It is a ``ModuleNotFoundError``, too.
    """
    importers = _importers()
    if not importers:
        return
    distribution = PACKAGES[package]
    extra = _extra_for(distribution, importers)
    if extra is not None:
        error = MissingPackageError(
            f"{distribution} is not installed; run: pip install 'bigdl[{extra}]'"
        )
        error.name = package
        raise error


def _importers() -> list[str]:
    """Return the modules of BigDL that are being imported for, outermost first.

    The statement may stand in a package that one of them imports: Lightning needs torch.
    """
    found: list[str] = []
    frame = sys._getframe(3)  # of what called the finder
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("bigdl."):
            found.insert(0, module)
        elif module not in ("importlib", "importlib._bootstrap", "importlib._bootstrap_external"):
            is_of_import = frame.f_code.co_name == "<module>"
            if not is_of_import or found or module.partition(".")[0] not in PACKAGES:
                break
        frame = frame.f_back  # type: ignore[assignment]
    return found


def _extra_for(distribution: str, importers: list[str]) -> str | None:
    """Return the extra to install: of a room that imports it, or another one that brings it."""
    brings = _extras_of(_canonical(distribution))
    rooms = [extra for module in importers if (extra := _of_room(module))]
    for extra in rooms:
        if not brings or brings.intersection(extra.split(",")):
            return extra
    return next((extra for extra in [*_FIRST, *sorted(brings)] if extra in brings), None)


def _of_room(module: str) -> str | None:
    names = (name for name in _OF_ROOMS if f"{module}.".startswith(f"{name}."))
    return _OF_ROOMS.get(max(names, key=len, default=""))


@functools.cache
def _extras_of(distribution: str) -> frozenset[str]:
    """Return the names of the extras that bring a distribution, by the metadata of BigDL."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("bigdl") or []
    except PackageNotFoundError:  # its source is on the path
        return frozenset()
    found = set()
    for line in lines:
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == [\"']([^\"']+)[\"']", line)
        if name and extra and _canonical(name[0]) == distribution:
            found.add(extra[1])
    return frozenset(found - {"all"})


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
