"""Hyper-parameter search for Keras models."""

from bigdl.common.errors import require

require("tensorflow", "nano,tf")  # its modules import both
require("keras", "nano,tf")
