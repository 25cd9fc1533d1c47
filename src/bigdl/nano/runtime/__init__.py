"""Settings of the running process that make numeric code faster; see :func:`tune`."""

from bigdl.nano.runtime.tuning import Setting, Tuning, tune

__all__ = ["Setting", "Tuning", "tune"]
