"""AutoML: searching for the hyper-parameters of PyTorch and Keras models."""

from bigdl.common.errors import UsageError
from bigdl.nano.attribute_patch import AttributePatch

__all__ = ["HPOConfig", "hpo_config"]


class HPOConfig:
    """Switches: the layers and optimizers of ``bigdl.nano.tf`` take search spaces or not.

    PyTorch's side needs no switch: ``@hpo.plmodel()`` says it of each class.

    Examples
    --------
    >>> from bigdl.nano.automl import hpo_config
    >>> hpo_config.enable_hpo_tf()
    >>> from bigdl.nano.automl.hpo import space
    >>> from bigdl.nano.tf.keras.layers import Dense  # takes spaces from now on
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
        """True if ``bigdl.nano.tf`` takes search spaces; set by :meth:`enable_hpo_tf`."""
        return self._tf.active

    @property
    def hpo_pytorch(self) -> bool:
        """True if :meth:`enable_hpo_pytorch` was called; nothing depends on it."""
        return self._pytorch

    def enable_hpo_tf(self) -> None:
        """Let layers, activations, ``Input``, ``cast`` and optimizers take search spaces.

        These are the names in ``bigdl.nano.tf.keras.layers``, ``bigdl.nano.tf.keras.activations``,
        ``bigdl.nano.tf.keras``, ``bigdl.nano.tf`` and ``bigdl.nano.tf.optimizers``. Import them
        after this call: what was imported before is Keras' own, and stays so.
        """
        if self.hpo_tf:
            return
        from bigdl.nano.automl.tf.keras import Model, Sequential
        from bigdl.nano.automl.tf.substitutes import substitutes

        for place in substitutes({"Sequential": Sequential, "Model": Model}):
            self._tf.set(*place)

    def disable_hpo_tf(self) -> None:
        """Undo :meth:`enable_hpo_tf`; what was imported meanwhile goes on taking spaces."""
        self._tf.undo()

    def enable_hpo_pytorch(self) -> None:
        """Accepted; ``@hpo.plmodel()`` and ``Trainer(use_hpo=True)`` need no more."""
        self._pytorch = True

    def disable_hpo_pytorch(self) -> None:
        """Undo :meth:`enable_hpo_pytorch`."""
        self._pytorch = False

    def reset(self) -> None:
        """Disable both."""
        self.disable_hpo_tf()
        self.disable_hpo_pytorch()


hpo_config = HPOConfig()
"""The switches of this process."""
