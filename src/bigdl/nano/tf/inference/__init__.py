"""Accelerated inference of Keras models."""

from bigdl.common.errors import require

require("tensorflow", "nano,tf")  # whose modules import it
