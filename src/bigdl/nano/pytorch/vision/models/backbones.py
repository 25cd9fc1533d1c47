"""Convolutional backbones with optional classification layer, freezing and pretrained weights.

Residual networks (He et al. 2015) with the aggregated (Xie et al. 2016) and wide variants
(Zagoruyko and Komodakis 2016); MobileNetV2 (Sandler et al. 2018) and MobileNetV3 (Howard et al.
2019); ShuffleNetV2 (Ma et al. 2018). Models are built from blocks according to the tables of the
papers. Users call objects of :class:`_PublishedModel`, such as ``resnet18``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import ClassVar, Generic, TypeVar
from urllib.error import URLError

import torch
from torch import nn

from bigdl.common.errors import UsageError
from bigdl.nano.lazy_names import public_names

NUM_CLASSES = 1000
"""Number of ImageNet classes, for which the published weights are trained."""

ModelT = TypeVar("ModelT", bound="BackboneModule")
_WEIGHTS = "https://download.pytorch.org/models/"


class BackboneModule(nn.Module):
    """Base class of convolutional networks that return features or class scores.

    A subclass registers its layers, and finally calls `_add_top` to register the classification
    layers under the name `top_name`. Without them, an identity is registered, so that the names of
    all other parameters do not change.

    Attributes
    ----------
    frozen : bool
        True after `freeze`, False after `unfreeze`.

    Examples
    --------
    >>> import torch
    >>> from bigdl.nano.pytorch.vision.models import resnet18
    >>> backbone = resnet18(freeze=True)  # pretrained=True loads the weights for ImageNet
    >>> backbone.get_output_size(), backbone(torch.zeros(2, 3, 64, 64)).shape
    (512, torch.Size([2, 512]))
    >>> backbone.train().training  # frozen: it stays in evaluation mode
    False
    >>> backbone.unfreeze().training
    True
    """

    top_name: ClassVar[str] = "fc"

    def __init__(self):
        super().__init__()
        self.frozen = False
        self._trunk: list[str] = []
        self._output_size = 0

    def _add_top(self, top: nn.Module, feature_size: int, include_top: bool) -> None:
        """Register the classification layers or an identity; called after the last layer.

        Parameters
        ----------
        top : torch.nn.Module
            Module from `feature_size` channels to scores of `NUM_CLASSES` classes.
        feature_size : int
            Number of channels of the pooled features.
        include_top : bool
            Whether the model returns scores.
        """
        self._trunk = [name for name, _ in self.named_children()]
        self.add_module(self.top_name, top if include_top else nn.Identity())
        self._output_size = NUM_CLASSES if include_top else feature_size

    def get_output_size(self) -> int:
        """Return the length of the model's output vector for one image."""
        return self._output_size

    def features_of(self, images: torch.Tensor) -> torch.Tensor:
        """Return the pooled features, float ``(N, C)``, of images ``(N, 3, H, W)``."""
        for name in self._trunk:
            images = getattr(self, name)(images)
        return images.flatten(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return features, or scores if the model has its classification layers.

        Parameters
        ----------
        x : torch.Tensor
            Images, float, ``(N, 3, H, W)``, height and width at least 32. The published weights
            expect RGB in 0…1, normalised by the mean (0.485, 0.456, 0.406) and the standard
            deviation (0.229, 0.224, 0.225).

        Returns
        -------
        torch.Tensor
            ``(N, get_output_size())``.
        """
        return getattr(self, self.top_name)(self.features_of(x))

    def freeze(self) -> BackboneModule:
        """Disable training of all parameters; stay in eval mode even if `train` is called.

        Batch normalisation then uses its stored statistics and does not update them, so that equal
        images give equal features in every epoch.
        """
        self.requires_grad_(False)
        self.frozen = True
        return self.eval()

    def unfreeze(self) -> BackboneModule:
        """Enable training of all parameters and switch to train mode."""
        self.requires_grad_(True)
        self.frozen = False
        return self.train()

    def train(self, mode: bool = True) -> BackboneModule:
        """Set the mode like ``torch.nn.Module.train``; a frozen backbone stays in eval mode."""
        return super().train(mode and not self.frozen)

    def load_weights(self, state: Mapping[str, torch.Tensor], source: str) -> None:
        """Load a full model's state dict; skip classification layers that this model lacks.

        Parameters
        ----------
        state : mapping of str to torch.Tensor
            State dict with torchvision's names.
        source : str
            Origin of the state dict, for the error message.

        Raises
        ------
        UsageError
            If names or shapes do not match this model.
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
                "pass a state dict of the same model.",
                code="model-mismatch",
                path=str(source),
            ) from error


class _PublishedModel(Generic[ModelT]):
    """Factory of a model with weights published by the PyTorch project.

    Parameters
    ----------
    name : str
    digest : str
        Start of the file's SHA-256, which is part of the file name.
    model_class : type
    *settings
        Arguments of the model class.
    stem : str, optional
        Start of the file name; the model's name by default.
    """

    def __init__(
        self,
        name: str,
        digest: str,
        model_class: Callable[..., ModelT],
        *settings: object,
        stem: str | None = None,
    ):
        self.__name__, self._file = name, f"{stem or name}-{digest}.pth"
        self._model_class, self._settings = model_class, settings
        self.__doc__ = self.__call__.__doc__  # for help()

    def __call__(
        self,
        pretrained: bool = False,
        include_top: bool = False,
        freeze: bool = False,
        weights: str | os.PathLike | None = None,
    ) -> ModelT:
        """Create the model, by default without its classification layers.

        Parameters
        ----------
        pretrained : bool
            Load torchvision's ImageNet weights, which are downloaded once to the cache of
            ``torch.hub``.
        include_top : bool
            Return scores of 1,000 classes instead of features.
        freeze : bool
            Freeze the model, see :meth:`BackboneModule.freeze`.
        weights : path, optional
            File with torchvision's state dict of this model; replaces the download.

        Raises
        ------
        UsageError
            If the weights cannot be downloaded or read, or do not fit.

        Examples
        --------
        >>> import torch
        >>> from bigdl.nano.pytorch.vision.models import resnet18
        >>> features = resnet18(freeze=True)
        >>> features(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 512])
        >>> torch.save(resnet18(include_top=True).state_dict(), "weights.pth")
        >>> scores = resnet18(include_top=True, weights="weights.pth")
        >>> scores(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 1000])
        """
        model = self._model_class(*self._settings, include_top=include_top)
        if weights is not None:
            model.load_weights(_local_state(weights), os.fspath(weights))
        elif pretrained:
            model.load_weights(_published_state(self.__name__, self._file), self._file)
        if freeze:
            model.freeze()
        return model


def _local_state(path: str | os.PathLike) -> Mapping[str, torch.Tensor]:
    if not os.path.isfile(path):
        raise UsageError(
            f"weights must be the path of a file with a state dict, but {os.fspath(path)!r} is "
            "not a file.",
            code="path-missing",
            path=str(path),
        )
    state = torch.load(path, map_location="cpu", weights_only=True)
    if not isinstance(state, Mapping):
        raise UsageError(
            f"{os.fspath(path)!r} holds a {type(state).__name__}; save a state dict there "
            "(torch.save(model.state_dict(), path)).",
            code="file-format",
            path=str(path),
        )
    return state


def _published_state(name: str, file: str) -> Mapping[str, torch.Tensor]:
    url = _WEIGHTS + file
    try:
        return torch.hub.load_state_dict_from_url(
            url, map_location="cpu", progress=False, check_hash=True, weights_only=True
        )
    except (URLError, OSError, RuntimeError) as error:  # RuntimeError: wrong hash
        raise UsageError(
            f"The weights of {name} cannot be downloaded from {url} ({error}); download the file "
            "by other means and pass its path as `weights`.",
            code="cluster-unreachable",
            address=url,
        ) from error


def _batch_normalized(
    channels_in: int,
    channels_out: int,
    kernel: int = 3,
    stride: int = 1,
    groups: int = 1,
    activation: type[nn.Module] | None = nn.ReLU,
    norm: type[nn.Module] | partial = nn.BatchNorm2d,
) -> list[nn.Module]:
    """Return a convolution, a normalization layer and an activation as a list.

    Parameters
    ----------
    channels_in, channels_out, kernel, stride, groups : int
        Arguments of the convolution, which has no bias, because the norm has one. Padding keeps
        the image's size except for the stride.
    activation : type, optional
        Class of an in-place activation; None for no activation.
    norm : callable
        Creates the norm for a number of channels.

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


def _initialize(model: nn.Module, linear_std: float | None = None) -> None:
    """Initialize convolutions as in He et al. (2015), and normalization layers as identities.

    Parameters
    ----------
    model : torch.nn.Module
        Model that is changed in place.
    linear_std : float, optional
        Standard deviation of the weights of linear layers, whose biases become 0. None keeps
        torch's initialization.
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


class _Residual(nn.Module):
    """Residual block: convolutions added to the input, or to a 1×1 convolution of the input.

    Parameters
    ----------
    convolutions : list of (int, int, int, int, int)
        Input channels, output channels, kernel size, stride and groups of each.
    """

    def __init__(self, convolutions: list[tuple[int, int, int, int, int]]):
        super().__init__()
        self.depth = len(convolutions)
        stride = 1
        for number, arguments in enumerate(convolutions, start=1):
            conv, norm = _batch_normalized(*arguments, activation=None)
            self.add_module(f"conv{number}", conv)
            self.add_module(f"bn{number}", norm)
            stride *= arguments[3]
        self.relu = nn.ReLU(inplace=True)
        channels_in, channels_out = convolutions[0][0], convolutions[-1][1]
        self.downsample = None
        if stride != 1 or channels_in != channels_out:
            shortcut = _batch_normalized(channels_in, channels_out, 1, stride, activation=None)
            self.downsample = nn.Sequential(*shortcut)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        branch = images
        for number in range(1, self.depth + 1):
            branch = getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(branch))
            if number < self.depth:
                branch = self.relu(branch)
        shortcut = images if self.downsample is None else self.downsample(images)
        return self.relu(branch + shortcut)


class ResNet(BackboneModule):
    """Residual network of four stages.

    The 3×3 convolution of a bottleneck has the stride, as in all published weights.

    Parameters
    ----------
    depths : tuple of int
        Number of blocks of each stage.
    bottleneck : bool
        Use blocks of three convolutions with four times as many output channels, instead of two
        convolutions.
    groups, width : int
        Groups of a bottleneck's 3×3 convolution, and channels per group in the first stage.
    include_top : bool
        Return scores of 1,000 classes instead of features.

    Examples
    --------
    >>> from bigdl.nano.pytorch.vision.models import resnet18, resnet50
    >>> resnet18().get_output_size(), resnet50().get_output_size()
    (512, 2048)
    >>> resnet18(include_top=True).fc
    Linear(in_features=512, out_features=1000, bias=True)
    """

    def __init__(
        self,
        depths: tuple[int, ...],
        bottleneck: bool,
        groups: int = 1,
        width: int = 64,
        include_top: bool = False,
    ):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        last = 64
        for stage, depth in enumerate(depths):
            channels = 64 << stage
            blocks = []
            for index in range(depth):
                stride = 2 if stage > 0 and index == 0 else 1
                if bottleneck:
                    inner, out = channels * width // 64 * groups, 4 * channels
                    convolutions = [
                        (last, inner, 1, 1, 1),
                        (inner, inner, 3, stride, groups),
                        (inner, out, 1, 1, 1),
                    ]
                else:
                    out = channels
                    convolutions = [(last, out, 3, stride, 1), (out, out, 3, 1, 1)]
                blocks.append(_Residual(convolutions))
                last = out
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self._add_top(nn.Linear(last, NUM_CLASSES), last, include_top)
        _initialize(self)


resnet18 = _PublishedModel("resnet18", "f37072fd", ResNet, (2, 2, 2, 2), False)
resnet34 = _PublishedModel("resnet34", "b627a593", ResNet, (3, 4, 6, 3), False)
resnet50 = _PublishedModel("resnet50", "0676ba61", ResNet, (3, 4, 6, 3), True)
resnet101 = _PublishedModel("resnet101", "63fe2227", ResNet, (3, 4, 23, 3), True)
resnet152 = _PublishedModel("resnet152", "394f9c45", ResNet, (3, 8, 36, 3), True)
resnext50_32x4d = _PublishedModel("resnext50_32x4d", "7cdf4587", ResNet, (3, 4, 6, 3), True, 32, 4)
resnext101_32x8d = _PublishedModel(
    "resnext101_32x8d", "8ba56ff5", ResNet, (3, 4, 23, 3), True, 32, 8
)
wide_resnet50_2 = _PublishedModel("wide_resnet50_2", "95faca4d", ResNet, (3, 4, 6, 3), True, 1, 128)
wide_resnet101_2 = _PublishedModel(
    "wide_resnet101_2", "32ee1156", ResNet, (3, 4, 23, 3), True, 1, 128
)


def _depthwise(
    channels_in: int, inner: int, kernel: int, stride: int, normalized: Callable[..., list]
) -> list[nn.Module]:
    """Return layers that expand to `inner` channels and convolve each channel separately."""
    layers: list[nn.Module] = []
    if inner != channels_in:
        layers.append(nn.Sequential(*normalized(channels_in, inner, 1)))
    return [*layers, nn.Sequential(*normalized(inner, inner, kernel, stride, inner))]


class _InvertedResidual(nn.Module):
    """Inverted residual block with a linear bottleneck, added to its input if shapes allow."""

    def __init__(
        self, name: str, layers: Iterable[nn.Module], channels_in: int, channels: int, stride: int
    ):
        super().__init__()
        self.add_module(name, nn.Sequential(*layers))
        self.is_residual = stride == 1 and channels_in == channels

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        (layers,) = self.children()
        return images + layers(images) if self.is_residual else layers(images)


class _SqueezeExcitation(nn.Module):
    """Squeeze-and-excitation block: two 1×1 convolutions compute a gate for each channel."""

    def __init__(self, channels: int):
        super().__init__()
        # a multiple of 8 close to a quarter, but not more than a tenth below it
        squeezed = max(8, (channels // 4 + 4) // 8 * 8)
        if squeezed < 0.9 * (channels // 4):
            squeezed += 8
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.activation = nn.ReLU(inplace=True)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.scale_activation = nn.Hardsigmoid(inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        gates = self.fc2(self.activation(self.fc1(self.avgpool(images))))
        return images * self.scale_activation(gates)


class _MobileNet(BackboneModule):
    """Base class of MobileNets: inverted residuals between two convolutions."""

    top_name = "classifier"

    def _assemble(
        self, layers: list[nn.Module], channels: int, top: nn.Module, include_top: bool
    ) -> None:
        """Register the layers, which output `channels` channels, and the classification layers."""
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self._add_top(top, channels, include_top)
        _initialize(self, linear_std=0.01)


# Table 2 of the V2 paper: expansion, channels, repetitions, stride of the first.
_V2_STAGES = [
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
]


class MobileNetV2(_MobileNet):
    """MobileNetV2 with width multiplier 1.

    Parameters
    ----------
    include_top : bool
        Return scores of 1,000 classes instead of features.

    Examples
    --------
    >>> from bigdl.nano.pytorch.vision.models import mobilenet_v2
    >>> mobilenet_v2().get_output_size()
    1280
    """

    def __init__(self, include_top: bool = False):
        super().__init__()
        normalized = partial(_batch_normalized, activation=nn.ReLU6)
        layers: list[nn.Module] = [nn.Sequential(*normalized(3, 32, 3, 2))]
        last = 32
        for expansion, channels, repetitions, first_stride in _V2_STAGES:
            for stride in [first_stride] + [1] * (repetitions - 1):
                inner = last * expansion
                block = _depthwise(last, inner, 3, stride, normalized)
                block += _batch_normalized(inner, channels, 1, activation=None)
                layers.append(_InvertedResidual("conv", block, last, channels, stride))
                last = channels
        layers.append(nn.Sequential(*normalized(last, 1280, 1)))
        top = nn.Sequential(nn.Dropout(0.2), nn.Linear(1280, NUM_CLASSES))
        self._assemble(layers, 1280, top, include_top)


mobilenet_v2 = _PublishedModel("mobilenet_v2", "b0353104", MobileNetV2)

# Tables 1 and 2 of the V3 paper: kernel, inner channels, channels, squeeze-and-excitation,
# hard swish instead of ReLU, stride.
_LARGE = [
    (3, 16, 16, False, False, 1),
    (3, 64, 24, False, False, 2),
    (3, 72, 24, False, False, 1),
    (5, 72, 40, True, False, 2),
    *[(5, 120, 40, True, False, 1)] * 2,
    (3, 240, 80, False, True, 2),
    (3, 200, 80, False, True, 1),
    *[(3, 184, 80, False, True, 1)] * 2,
    (3, 480, 112, True, True, 1),
    (3, 672, 112, True, True, 1),
    (5, 672, 160, True, True, 2),
    *[(5, 960, 160, True, True, 1)] * 2,
]
_SMALL = [
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    *[(5, 240, 40, True, True, 1)] * 2,
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    *[(5, 576, 96, True, True, 1)] * 2,
]


class MobileNetV3(_MobileNet):
    """MobileNetV3 with width multiplier 1.

    Parameters
    ----------
    blocks : list of tuple
        Kernel, inner channels, channels, squeeze-and-excitation, hard swish, stride.
    hidden : int
        Size of the hidden classification layer.
    include_top : bool
        Return scores of 1,000 classes instead of features.

    Examples
    --------
    >>> from bigdl.nano.pytorch.vision.models import mobilenet_v3_large, mobilenet_v3_small
    >>> mobilenet_v3_small().get_output_size(), mobilenet_v3_large().get_output_size()
    (576, 960)
    """

    def __init__(self, blocks: list[tuple], hidden: int, include_top: bool = False):
        super().__init__()
        norm = partial(nn.BatchNorm2d, eps=0.001, momentum=0.01)
        normalized = partial(_batch_normalized, norm=norm)
        swished = partial(normalized, activation=nn.Hardswish)
        last = 16
        layers: list[nn.Module] = [nn.Sequential(*swished(3, last, 3, 2))]
        for kernel, inner, channels, excite, hard_swish, stride in blocks:
            block = _depthwise(last, inner, kernel, stride, swished if hard_swish else normalized)
            if excite:
                block.append(_SqueezeExcitation(inner))
            block.append(nn.Sequential(*normalized(inner, channels, 1, activation=None)))
            layers.append(_InvertedResidual("block", block, last, channels, stride))
            last = channels
        features = 6 * last
        layers.append(nn.Sequential(*swished(last, features, 1)))
        top = nn.Sequential(
            nn.Linear(features, hidden),
            nn.Hardswish(inplace=True),
            nn.Dropout(0.2),
            nn.Linear(hidden, NUM_CLASSES),
        )
        self._assemble(layers, features, top, include_top)


mobilenet_v3_large = _PublishedModel("mobilenet_v3_large", "8738ca79", MobileNetV3, _LARGE, 1280)
mobilenet_v3_small = _PublishedModel("mobilenet_v3_small", "047dcff4", MobileNetV3, _SMALL, 1024)


class _ShuffleUnit(nn.Module):
    """Shuffle unit: convolves half of the channels, then interleaves the halves.

    With a stride, both halves are computed from all input channels.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int):
        super().__init__()
        half = channels_out // 2
        self.splits = stride == 1
        shortcut = []
        if not self.splits:
            shortcut = [
                *_batch_normalized(channels_in, channels_in, 3, stride, channels_in, None),
                *_batch_normalized(channels_in, half, 1),
            ]
        self.branch1 = nn.Sequential(*shortcut)
        self.branch2 = nn.Sequential(
            *_batch_normalized(half if self.splits else channels_in, half, 1),
            *_batch_normalized(half, half, 3, stride, half, None),
            *_batch_normalized(half, half, 1),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        left, right = images.chunk(2, dim=1) if self.splits else (images, images)
        joined = torch.stack((self.branch1(left), self.branch2(right)), dim=2)
        return joined.flatten(1, 2)  # channel 0 of both halves, channel 1 of both, …


class ShuffleNetV2(BackboneModule):
    """ShuffleNetV2 (Ma et al. 2018).

    Parameters
    ----------
    channels : tuple of int
        Output channels of the three stages and of the last convolution.
    include_top : bool
        Return scores of 1,000 classes instead of features.

    Examples
    --------
    >>> from bigdl.nano.pytorch.vision.models import shufflenet_v2_x1_0
    >>> shufflenet_v2_x1_0().get_output_size()
    1024
    """

    def __init__(self, channels: tuple[int, ...], include_top: bool = False):
        super().__init__()
        self.conv1 = nn.Sequential(*_batch_normalized(3, 24, 3, 2))
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        channels_in = 24
        *widths, features = channels
        for number, (width, depth) in enumerate(zip(widths, (4, 8, 4), strict=True), start=2):
            units = [_ShuffleUnit(channels_in, width, 2)]
            units += [_ShuffleUnit(width, width, 1) for _ in range(depth - 1)]
            self.add_module(f"stage{number}", nn.Sequential(*units))
            channels_in = width
        self.conv5 = nn.Sequential(*_batch_normalized(channels_in, features, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self._add_top(nn.Linear(features, NUM_CLASSES), features, include_top)


shufflenet_v2_x0_5 = _PublishedModel(
    "shufflenet_v2_x0_5", "f707e7126e", ShuffleNetV2, (48, 96, 192, 1024), stem="shufflenetv2_x0.5"
)
shufflenet_v2_x1_0 = _PublishedModel(
    "shufflenet_v2_x1_0", "5666bf0f80", ShuffleNetV2, (116, 232, 464, 1024), stem="shufflenetv2_x1"
)
shufflenet_v2_x1_5 = _PublishedModel(
    "shufflenet_v2_x1_5", "3c479a10", ShuffleNetV2, (176, 352, 704, 1024), stem="shufflenetv2_x1_5"
)
shufflenet_v2_x2_0 = _PublishedModel(
    "shufflenet_v2_x2_0", "8be3c8ee", ShuffleNetV2, (244, 488, 976, 2048), stem="shufflenetv2_x2_0"
)

__all__ = public_names(__name__)
