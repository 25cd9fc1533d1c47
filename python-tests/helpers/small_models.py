"""Small modules with the shapes of inputs and outputs that users have."""

from __future__ import annotations

import torch
from torch import nn


class Convolutional(nn.Module):
    """Images to a tensor; has an attribute and a method of its own."""

    channels = 3

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3)
        )
        self.classify = nn.Linear(8, 4)

    def forward(self, x):
        return self.classify(self.features(x).mean((2, 3)))

    def describe(self):
        return f"{self.channels} channels"


class Nested(nn.Module):
    """A tensor, a dict of tensors, an optional tensor and a constant to a dict."""

    def __init__(self):
        super().__init__()
        self.left = nn.Linear(6, 5)
        self.right = nn.Linear(4, 5)

    def forward(self, x, more, scale: float = 2.0, mask=None):
        hidden = torch.relu(self.left(x) + self.right(more["a"])) * scale
        if mask is not None:
            hidden = hidden * mask
        return {"hidden": hidden, "parts": [hidden.sum(1), (more["b"] + 1, hidden.mean())]}


class Encoder(nn.Module):
    """A transformer of two layers, with a dict as its output."""

    def __init__(self, words: int = 50, size: int = 16):
        super().__init__()
        self.embed = nn.Embedding(words, size)
        layer = nn.TransformerEncoderLayer(size, 2, 32, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(size, 3)

    def forward(self, input_ids, attention_mask=None):
        hidden = self.embed(input_ids)
        padding = None if attention_mask is None else attention_mask == 0
        hidden = self.layers(hidden, src_key_padding_mask=padding)
        return {"logits": self.head(hidden[:, 0]), "last_hidden_state": hidden}


class Recurrent(nn.Module):
    """An LSTM with a head."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


class Tabular(nn.Module):
    """Numbers and categories, two inputs."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.mlp = nn.Sequential(nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, numbers, category):
        return self.mlp(torch.cat([numbers, self.embed(category)], 1)).squeeze(1)


class Branching(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self):
        super().__init__()
        self.small = nn.Linear(4, 4)
        self.large = nn.Linear(4, 4)

    def forward(self, x):
        if x.sum() > 0:
            return self.large(x)
        return self.small(x)


def seeded(cls, *args):
    """A module with the same weights in every process, in training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(7)
        return cls(*args)


def images(rows: int = 2, seed: int = 0) -> torch.Tensor:
    """Random images of 3 channels."""
    return torch.rand(rows, 3, 16, 16, generator=torch.Generator().manual_seed(seed))
