"""Quantize a text encoder to int8: calibration, accuracy, and layers in floating point.

    python examples/nano/quantize_encoder.py --accelerator openvino

A BERT-like encoder learns whether a word of one group precedes a word of another group in a
sentence of random words. Then it is quantized twice: completely, and with a metric that keeps
layers in floating point until the accuracy is preserved.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigdl.nano.pytorch import InferenceOptimizer

WORDS, LENGTH = 40, 12


class Encoder(nn.Module):
    """Text encoder that returns scores of two classes and the hidden states."""

    def __init__(self, size: int, layers: int):
        super().__init__()
        self.words = nn.Embedding(WORDS, size, padding_idx=0)
        self.places = nn.Embedding(LENGTH, size)
        self.norm = nn.LayerNorm(size)
        block = nn.TransformerEncoderLayer(
            size, 4, 4 * size, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.classify = nn.Linear(size, 2)

    def forward(self, input_ids, attention_mask):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        hidden = self.norm(self.words(input_ids) + self.places(positions))
        hidden = self.layers(hidden, src_key_padding_mask=attention_mask == 0)
        return {"logits": self.classify(hidden[:, 0]), "last_hidden_state": hidden}


def sentences(count, seed):
    """Return ids and masks, int64 (N, LENGTH); label 1 if a word below 4 precedes one below 7."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(7, WORDS, (count, LENGTH), generator=generator)
    order = torch.rand(count, LENGTH - 4, generator=generator).argsort(1)[:, :2] + 1
    first, second = (torch.randint(low, low + 3, (count,), generator=generator) for low in (1, 4))
    rows = torch.arange(count)
    ids[rows, order[:, 0]], ids[rows, order[:, 1]] = first, second
    lengths = torch.randint(LENGTH - 3, LENGTH + 1, (count, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return TensorDataset(ids * mask, mask, (order[:, 0] < order[:, 1]).long())


def trained(data, size, layers, epochs):
    torch.manual_seed(0)
    model = Encoder(size, layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for ids, mask, label in DataLoader(data, batch_size=64, shuffle=True):
            loss = nn.functional.cross_entropy(model(ids, mask)["logits"], label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def accuracy(model, loader):
    """Return the accuracy; the optimizer and the program use the same function."""
    right = count = 0
    for ids, mask, label in loader:
        right += int((model(ids, mask)["logits"].argmax(1) == label).sum())
        count += len(label)
    return right / count


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--accelerator", choices=["openvino", "onnxruntime"], default="openvino")
    parser.add_argument("--size", type=int, default=64, help="size of a hidden state")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--sentences", type=int, default=2000)
    parser.add_argument("--drop", type=float, default=0.005, help="maximum loss of accuracy")
    options = parser.parse_args(argv)

    train, test = sentences(options.sentences, 0), sentences(1000, 1)
    model = trained(train, options.size, options.layers, options.epochs)
    calibration = DataLoader(train, batch_size=32)
    held_out = DataLoader(test, batch_size=100)
    int8 = {"precision": "int8", "accelerator": options.accelerator, "calib_data": calibration}

    models = {
        "fp32": model,
        "int8": InferenceOptimizer.quantize(model, sample_size=256, **int8),
        "int8, accuracy kept": InferenceOptimizer.quantize(
            model,
            sample_size=256,
            eval_func=lambda candidate: accuracy(candidate, held_out),
            accuracy_criterion={"absolute": options.drop, "higher_is_better": True},
            **int8,
        ),
    }
    accuracies = {}
    for name, each in models.items():
        with InferenceOptimizer.get_context(each):
            accuracies[name] = accuracy(each, held_out)
        print(f"{name}: accuracy {accuracies[name]:.3f}")
    return accuracies


if __name__ == "__main__":
    main()
