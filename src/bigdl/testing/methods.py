"""Contract tests of acceleration methods."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

__all__ = ["AccelerationMethodContract"]


class _Model(Protocol):
    def __call__(self, *inputs: object) -> object: ...


def _is_torch(model: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


def _results(model: _Model, inputs: Sequence[object]) -> npt.NDArray[np.float64]:
    if not _is_torch(model):
        return np.asarray(model(*inputs), np.float64)
    import torch

    with torch.no_grad():
        result = model(*inputs)
    assert isinstance(result, torch.Tensor)
    array: npt.NDArray[np.float64] = result.double().numpy()
    return array


def _weights(model: _Model) -> list[tuple[object, tuple[int, ...], npt.NDArray[np.generic]]]:
    """Return the dtype, the strides and a copy of each array of a model."""
    if _is_torch(model):
        states = model.state_dict().values()  # type: ignore[attr-defined]
        return [(each.dtype, each.stride(), each.double().numpy().copy()) for each in states]
    return [(each.dtype, each.strides, each.copy()) for each in model.get_weights()]  # type: ignore[attr-defined]


class AccelerationMethodContract:
    """Contract tests of an acceleration method; pytest runs the subclasses named ``Test...``.

    Attributes
    ----------
    optimizer : type
        The ``InferenceOptimizer`` of PyTorch or of Keras.
    method : str
        Name of a registered method.
    tolerance : float, default 1e-5
        Maximum absolute difference from the original's results.
    options : dict
        Further keywords of ``InferenceOptimizer.build``, such as ``calib_data``.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch import InferenceOptimizer
    >>> from bigdl.testing.methods import AccelerationMethodContract
    >>> class TestScript(AccelerationMethodContract):
    ...     optimizer, method = InferenceOptimizer, "jit_fp32"
    ...     def model(self):
    ...         return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
    ...     def sample(self, rows):
    ...         return [torch.rand(rows, 3)]
    >>> TestScript().test_it_agrees_with_the_original_for_any_batch()  # pytest runs all
    """

    optimizer: Any  # one of two classes with different method signatures
    method: str
    tolerance: float = 1e-5
    options: dict[str, object] = {}  # noqa: RUF012 - replaced, never mutated

    def model(self) -> _Model:
        """Return a model of the framework with one output."""
        raise NotImplementedError(f"{type(self).__name__} needs a method model()")

    def sample(self, rows: int) -> Sequence[object]:
        """Return model inputs of `rows` rows, as tensors or ndarrays."""
        raise NotImplementedError(f"{type(self).__name__} needs a method sample(rows)")

    def _built(self, model: _Model) -> _Model:
        options = dict(self.options)
        if _is_torch(model):
            inputs = self.sample(2)
            options.setdefault("input_sample", inputs[0] if len(inputs) == 1 else tuple(inputs))
        built: _Model = self.optimizer.build(model, self.method, **options)
        return built

    def _expected(self, model: _Model, inputs: Sequence[object]) -> npt.NDArray[np.float64]:
        if _is_torch(model):
            model = copy.deepcopy(model).eval()  # type: ignore[attr-defined]
        return _results(model, inputs)

    def test_it_is_registered_under_its_name(self) -> None:
        """Check that the method is registered under its name and available here."""
        from bigdl.nano.acceleration import find_method

        method = find_method(self.method, "torch" if _is_torch(self.model()) else "keras")
        assert method.name == self.method
        assert method.missing() is None

    def test_it_agrees_with_the_original_for_any_batch(self) -> None:
        """Check that accelerated results match the original for several batch sizes."""
        model = self.model()
        fast = self._built(model)
        for rows in (2, 1, 5):
            inputs = self.sample(rows)
            actual, expected = _results(fast, inputs), self._expected(model, inputs)
            np.testing.assert_allclose(actual, expected, rtol=0, atol=self.tolerance)
            if _is_torch(model):
                with self.optimizer.get_context(fast):
                    inside = _results(fast, inputs)
                np.testing.assert_allclose(inside, actual, rtol=1e-5, atol=1e-6)
                assert not getattr(fast(*inputs), "requires_grad", False)

    def test_the_original_is_not_changed(self) -> None:
        """Check that weights, dtypes and training mode of the original stay unchanged."""
        model = self.model()
        if _is_torch(model):
            model.train()  # type: ignore[attr-defined]
        before = _weights(model)
        self._built(model)
        for old, new in zip(before, _weights(model), strict=True):
            assert old[:2] == new[:2]
            assert np.array_equal(old[2], new[2])
        if _is_torch(model):
            assert all(part.training for part in model.modules())  # type: ignore[attr-defined]

    def test_a_loaded_model_gives_the_same_bits(self, tmp_path: Path) -> None:
        """Check that a saved and loaded model returns bitwise equal results."""
        model = self.model()
        fast = self._built(model)
        self.optimizer.save(fast, tmp_path / "model")
        loaded = self.optimizer.load(tmp_path / "model", model=model)
        inputs = self.sample(3)
        assert np.array_equal(_results(loaded, inputs), _results(fast, inputs))
