"""BigDL: distributed training on clusters and acceleration on one machine."""

from pkgutil import extend_path

# Other distributions may add packages to this namespace.
__path__ = extend_path(__path__, __name__)


def __getattr__(name: str) -> str:
    if name == "__version__":
        from importlib.metadata import version

        return version("bigdl")
    raise AttributeError(f"module 'bigdl' has no attribute {name!r}")
