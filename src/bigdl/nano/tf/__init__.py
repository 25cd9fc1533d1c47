"""Nano for TensorFlow and Keras: the same model, faster."""

from bigdl.common.environment import quiet_tensorflow
from bigdl.nano.tf.patching import patch_tensorflow, unpatch_tensorflow

__all__ = ["patch_tensorflow", "unpatch_tensorflow"]

quiet_tensorflow()  # its modules import it
