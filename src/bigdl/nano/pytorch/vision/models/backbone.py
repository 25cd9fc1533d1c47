"""The base of the backbones: an optional top, freezing, and loading of weights."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import ClassVar, Protocol, TypeVar
from urllib.error import URLError

import torch
from torch import nn

from bigdl.common.errors import UsageError

__all__ = ["BackboneModule"]

NUM_CLASSES = 1000
"""Classes of ImageNet, which the published weights tell apart."""

ModelT = TypeVar("ModelT", bound="BackboneModule")
ModelT_co = TypeVar("ModelT_co", bound="BackboneModule", covariant=True)
_WEIGHTS = "https://download.pytorch.org/models/"


class BackboneModule(nn.Module, ABC):
    """A convolutional network that turns images into features, or into scores of classes.

    A subclass computes pooled features in `features_of`; what lies under the name `top_name`, the
    layers of the classification, comes after them. Without its top a backbone has an identity
    there, so the names of all other parameters stay what they are.

    Attributes
    ----------
    frozen : bool
        Whether `freeze` was called last, or `unfreeze`.
    """

    top_name: ClassVar[str] = "fc"

    def __init__(self):
        super().__init__()
        self.frozen = False
        self._output_size = 0

    def _add_top(self, top: nn.Module, feature_size: int, include_top: bool) -> None:
        """Register the top, or an identity; a subclass calls it after its last layer.

        Parameters
        ----------
        top : torch.nn.Module
            From `feature_size` channels to scores of `NUM_CLASSES` classes.
        feature_size : int
            Channels of the pooled features.
        include_top : bool
            Whether the model gives scores.
        """
        self.add_module(self.top_name, top if include_top else nn.Identity())
        self._output_size = NUM_CLASSES if include_top else feature_size

    def get_output_size(self) -> int:
        """Length of the vector that the model makes of an image."""
        return self._output_size

    @abstractmethod
    def features_of(self, images: torch.Tensor) -> torch.Tensor:
        """Pooled features, float ``(N, C)``, of images ``(N, 3, H, W)``."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Features or scores.

        Parameters
        ----------
        images : torch.Tensor
            Float, ``(N, 3, H, W)``, height and width at least 32. The published weights expect
            RGB in 0…1, normalised by the mean (0.485, 0.456, 0.406) and the standard deviation
            (0.229, 0.224, 0.225).

        Returns
        -------
        torch.Tensor
            ``(N, get_output_size())``.
        """
        return getattr(self, self.top_name)(self.features_of(images))

    def freeze(self) -> BackboneModule:
        """Exclude all parameters from training and stay in eval mode, whatever `train` says.

        Batch normalisation thus uses its stored statistics and leaves them alone: equal images
        give equal features in every epoch.
        """
        self.requires_grad_(False)
        self.frozen = True
        return self.eval()

    def unfreeze(self) -> BackboneModule:
        """Train all parameters again, and follow `train` and `eval` again; in train mode now."""
        self.requires_grad_(True)
        self.frozen = False
        return self.train()

    def train(self, mode: bool = True) -> BackboneModule:
        """Like ``torch.nn.Module.train``; a frozen backbone stays in eval mode."""
        return super().train(mode and not self.frozen)

    def load_weights(self, state: Mapping[str, torch.Tensor], source: str) -> None:
        """Load a state dict of the whole model; a model without its top leaves out the top's part.

        Parameters
        ----------
        state : mapping of str to torch.Tensor
            Names as in torchvision's model.
        source : str
            Where the state comes from, for the error.

        Raises
        ------
        UsageError
            If names or shapes are not those of this model.
        """
        entries = self.state_dict()
        top = self.top_name + "."
        if not any(name.startswith(top) for name in entries):
            state = {name: value for name, value in state.items() if not name.startswith(top)}
        try:
            self.load_state_dict(state, strict=True)
        except RuntimeError as error:
            differs = sorted(
                name
                for name in entries.keys() | state.keys()
                if name not in state
                or name not in entries
                or state[name].shape != entries[name].shape
            )
            raise UsageError(
                f"{source} does not hold the weights of this {type(self).__name__}: "
                f"{len(differs)} of {len(entries)} entries differ, the first is {differs[0]!r}; "
                "pass a state dict of the same model."
            ) from error


class Constructor(Protocol[ModelT_co]):
    """A function that makes a backbone."""

    def __call__(
        self,
        pretrained: bool = False,
        include_top: bool = False,
        freeze: bool = False,
        weights: str | os.PathLike | None = None,
    ) -> ModelT_co: ...


_PARAMETERS = """

    Parameters
    ----------
    pretrained : bool
        Load the weights that torchvision publishes for ImageNet; they are downloaded once, to
        the cache of ``torch.hub``.
    include_top : bool
        Give scores of 1,000 classes instead of features.
    freeze : bool
        Exclude the model from training, see :meth:`BackboneModule.freeze`.
    weights : path, optional
        A file with torchvision's state dict of this model, instead of a download.

    Raises
    ------
    UsageError
        If the weights cannot be downloaded or read, or do not fit.
    """


def published(file: str) -> Callable[[Callable[[bool], ModelT]], Constructor[ModelT]]:
    """Return a decorator: a function of `include_top` becomes a constructor that loads weights.

    Parameters
    ----------
    file : str
        Name of the file of published weights.
    """

    def decorate(make: Callable[[bool], ModelT]) -> Constructor[ModelT]:
        @wraps(make, assigned=("__module__", "__name__", "__qualname__"))
        def construct(
            pretrained: bool = False,
            include_top: bool = False,
            freeze: bool = False,
            weights: str | os.PathLike | None = None,
        ) -> ModelT:
            model = make(include_top)
            if weights is not None:
                model.load_weights(_local_state(weights), os.fspath(weights))
            elif pretrained:
                model.load_weights(_published_state(make.__name__, file), file)
            if freeze:
                model.freeze()
            return model

        del construct.__wrapped__  # its signature is another
        construct.__annotations__["return"] = make.__annotations__["return"]
        construct.__doc__ = f"{make.__doc__}{_PARAMETERS}"
        return construct

    return decorate


def _local_state(path: str | os.PathLike) -> Mapping[str, torch.Tensor]:
    if not os.path.isfile(path):
        raise UsageError(
            f"weights must be the path of a file with a state dict, but {os.fspath(path)!r} is "
            "not a file."
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping):
        raise UsageError(
            f"{os.fspath(path)!r} holds a {type(state).__name__}; save a state dict there "
            "(torch.save(model.state_dict(), path))."
        )
    return state


def _published_state(name: str, file: str) -> Mapping[str, torch.Tensor]:
    url = _WEIGHTS + file
    try:
        return torch.hub.load_state_dict_from_url(
            url, map_location="cpu", progress=False, check_hash=True, weights_only=True
        )
    except (URLError, OSError, RuntimeError) as error:  # RuntimeError: the hash is wrong
        raise UsageError(
            f"The weights of {name} cannot be downloaded from {url} ({error}); download the file "
            "by other means and pass its path as `weights`."
        ) from error


def batch_normalized(
    channels_in: int,
    channels_out: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = nn.ReLU,
    norm: type[nn.Module] | partial = nn.BatchNorm2d,
) -> list[nn.Module]:
    """A convolution that keeps the image's size but for its stride, its norm and its activation.

    Parameters
    ----------
    channels_in, channels_out, kernel, stride, groups : int
        Of the convolution, which has no bias: the norm has one.
    activation : type, optional
        Class of an activation that works in place; none if None.
    norm : callable
        Makes the norm of a number of channels.

    Returns
    -------
    list of torch.nn.Module
        Two or three layers, for an ``nn.Sequential``.
    """
    conv = nn.Conv2d(
        channels_in, channels_out, kernel, stride, kernel // 2, groups=groups, bias=False
    )
    layers = [conv, norm(channels_out)]
    return layers if activation is None else [*layers, activation(inplace=True)]


def initialize(model: nn.Module, linear_std: float | None = None) -> None:
    """Kaiming's initialisation of convolutions (He et al. 2015), norms that change nothing.

    Parameters
    ----------
    model : torch.nn.Module
        Changed in place.
    linear_std : float, optional
        Standard deviation of the weights of linear layers, whose biases become 0; torch's own
        initialisation if None.
    """
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.BatchNorm2d):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.Linear) and linear_std is not None:
            nn.init.normal_(layer.weight, 0.0, linear_std)
            nn.init.zeros_(layer.bias)
