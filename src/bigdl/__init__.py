"""BigDL: models trained on the data of a cluster, and made faster on one machine."""

from pkgutil import extend_path

# Other distributions may have packages in this one.
__path__ = extend_path(__path__, __name__)


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("bigdl")
    raise AttributeError(f"module 'bigdl' has no attribute {name!r}")
