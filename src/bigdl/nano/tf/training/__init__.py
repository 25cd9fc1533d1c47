"""Training of Keras models in several processes of one machine."""

from bigdl.common.errors import require

require("tensorflow", "nano,tf")  # whose modules import it
