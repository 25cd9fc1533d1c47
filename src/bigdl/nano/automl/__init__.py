"""AutoML: hyper-parameter search for PyTorch and Keras models."""

from bigdl.common.errors import UsageError
from bigdl.nano.attribute_patch import AttributePatch

__all__ = ["HPOConfig", "hpo_config"]


class HPOConfig:
    """Switches that let layers and optimizers in ``bigdl.nano.tf`` accept search spaces.

    PyTorch needs no switch: ``@hpo.plmodel()`` decorates each searchable class.

    Examples
    --------
    >>> from bigdl.nano.automl import hpo_config
    >>> hpo_config.enable_hpo_tf()
    >>> from bigdl.nano.automl.hpo import space
    >>> from bigdl.nano.tf.keras.layers import Dense  # accepts spaces from now on
    >>> Dense(units=space.Int(8, 64), activation="relu")
    Dense(units=Int(8, 64), activation='relu')
    >>> hpo_config.disable_hpo_tf()
    >>> hpo_config.hpo_tf
    False
    """

    def __init__(self) -> None:
        self._tf, self._pytorch = AttributePatch(), False

    def __setattr__(self, name: str, value: object) -> None:
        if not name.startswith("_"):
            raise UsageError(
                f"Directly set {name} value is not permitted. Please use enable_{name}() or "
                f"disable_{name}()",
                code="unsupported",
                argument=name,
            )
        super().__setattr__(name, value)

    @property
    def hpo_tf(self) -> bool:
        """True if ``bigdl.nano.tf`` accepts search spaces; set by :meth:`enable_hpo_tf`."""
        return self._tf.active

    @property
    def hpo_pytorch(self) -> bool:
        """True if :meth:`enable_hpo_pytorch` was called; it has no further effect."""
        return self._pytorch

    def enable_hpo_tf(self) -> None:
        """Let layers, activations, ``Input``, ``cast`` and optimizers accept search spaces.

        It replaces names in ``bigdl.nano.tf.keras.layers``, ``bigdl.nano.tf.keras.activations``,
        ``bigdl.nano.tf.keras``, ``bigdl.nano.tf`` and ``bigdl.nano.tf.optimizers``. Import them
        after this call: names imported before remain the classes and functions of Keras.
        """
        if self.hpo_tf:
            return
        from bigdl.nano.automl.tf.keras import Model, Sequential
        from bigdl.nano.automl.tf.substitutes import substitutes

        for module, name, value in substitutes({"Sequential": Sequential, "Model": Model}):
            self._tf.set(module, name, value)

    def disable_hpo_tf(self) -> None:
        """Undo :meth:`enable_hpo_tf`; names imported in the meantime still accept spaces."""
        self._tf.undo()

    def enable_hpo_pytorch(self) -> None:
        """Set a flag for compatibility with BigDL 2.x; PyTorch searches do not need it."""
        self._pytorch = True

    def disable_hpo_pytorch(self) -> None:
        """Undo :meth:`enable_hpo_pytorch`."""
        self._pytorch = False

    def reset(self) -> None:
        """Disable search spaces for TensorFlow and PyTorch."""
        self.disable_hpo_tf()
        self.disable_hpo_pytorch()


hpo_config = HPOConfig()
"""Switches of this process."""
