"""Nano for TensorFlow and Keras: acceleration of unchanged models."""

from bigdl.common.environment import quiet_tensorflow
from bigdl.common.errors import check_installed
from bigdl.nano.tf.patching import patch_tensorflow, unpatch_tensorflow

__all__ = ["patch_tensorflow", "unpatch_tensorflow"]

check_installed("nano,tf", "keras", "tensorflow")
quiet_tensorflow()  # the modules of this package import it
