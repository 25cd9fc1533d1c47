"""Accelerated inference of Keras models."""

from bigdl.common.errors import require

require("tensorflow", "nano,tf")  # the modules of this package import it
