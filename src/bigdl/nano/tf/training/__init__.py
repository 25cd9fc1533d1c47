"""Multi-process training of Keras models on one machine."""

from bigdl.common.errors import require

require("tensorflow", "nano,tf")  # the modules of this package import it
