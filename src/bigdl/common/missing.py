"""Error messages for packages of extras that are not installed.

Modules import their dependencies by plain statements. If a package is missing, the last module
finder (:mod:`bigdl.common.dropped`) calls :func:`refuse`.
"""

import functools
import re
import sys

from bigdl.common.errors import MissingExtraError

__all__ = ["PACKAGES", "MissingPackageError", "installed_version", "refuse"]

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
    "langchain_core": "langchain-core",
    "lightgbm": "lightgbm",
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
"""Distributions of the extras by their import names."""

# The extras that install a package of BigDL; the longest matching name counts.
_EXTRAS_OF_PACKAGES = {
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
# The order of preference if the importing package's extra does not contain the distribution.
_FIRST = ["orca", "nano", "tf", "ray", "automl", "serving"]


class MissingPackageError(MissingExtraError, ModuleNotFoundError):
    """Raised when a package of an extra is not installed; also a ModuleNotFoundError."""


def refuse(package: str) -> None:
    """Raise an error if a module of BigDL imports a missing package of an extra.

    Imports by other programs are ignored. A module finder calls this function.

    Parameters
    ----------
    package : str
        A key of ``PACKAGES``.

    Raises
    ------
    MissingExtraError
        Also a ``ModuleNotFoundError``.
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
    """Return the modules of BigDL that are being imported, outermost first.

    The import statement may be in a package that BigDL imports: Lightning needs torch.
    """
    importers: list[str] = []
    frame = sys._getframe(3)  # the caller of the finder
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("bigdl."):
            importers.insert(0, module)
        elif module not in ("importlib", "importlib._bootstrap", "importlib._bootstrap_external"):
            is_of_import = frame.f_code.co_name == "<module>"
            if not is_of_import or importers or module.partition(".")[0] not in PACKAGES:
                break
        frame = frame.f_back  # type: ignore[assignment]
    return importers


def _extra_for(distribution: str, importers: list[str]) -> str | None:
    """Return the extra that installs a distribution, preferably the importing package's extra."""
    brings = _extras_of(_canonical(distribution))
    own_extras = [extra for module in importers if (extra := _extra_of_module(module))]
    for extra in own_extras:
        if not brings or brings.intersection(extra.split(",")):
            return extra
    return next((extra for extra in [*_FIRST, *sorted(brings)] if extra in brings), None)


def _extra_of_module(module: str) -> str | None:
    names = (name for name in _EXTRAS_OF_PACKAGES if f"{module}.".startswith(f"{name}."))
    return _EXTRAS_OF_PACKAGES.get(max(names, key=len, default=""))


@functools.cache
def _extras_of(distribution: str) -> frozenset[str]:
    """Return the extras that contain a distribution, according to BigDL's metadata."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        lines = requires("bigdl") or []
    except PackageNotFoundError:  # its source is on the path
        return frozenset()
    extras = set()
    for line in lines:
        name = re.match(r"[\w.-]+", line)
        extra = re.search(r"extra == [\"']([^\"']+)[\"']", line)
        if name and extra and _canonical(name[0]) == distribution:
            extras.add(extra[1])
    return frozenset(extras - {"all"})


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None if it is not installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
