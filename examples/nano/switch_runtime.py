"""Switch a model between PyTorch and ONNX Runtime.

    python examples/nano/switch_runtime.py

The Trainer quantizes a trained model for ONNX Runtime. The returned model runs in PyTorch until
``eval_onnx``, and again after ``exit_onnx`` or ``train``. The calls are those of the BigDL 2.0
paper (Dai et al., CVPR 2022).
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from bigdl.nano.pytorch import Trainer


def digits():
    """Return two data sets of images (N, 1, 8, 8) and labels."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    y = torch.from_numpy(labels)
    return TensorDataset(x[:1400], y[:1400]), TensorDataset(x[1400:], y[1400:])


def trained(data, epochs):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 10),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=64, shuffle=True):
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=6)
    options = parser.parse_args(argv)

    train, test = digits()
    data, labels = test.tensors
    model = trained(train, options.epochs)

    trainer = Trainer(logger=False, enable_checkpointing=False)
    model = trainer.quantize(model, calib_data=DataLoader(train, batch_size=32), onnx=True)

    outputs = {}

    def note(runtime):
        with torch.inference_mode():
            output = model(data)
        outputs[runtime] = output
        right = float((output.argmax(1) == labels).float().mean())
        print(f"{runtime}: accuracy {right:.3f}")

    model.eval()
    note("PyTorch, fp32")
    model.eval_onnx(quantize=True)
    note("ONNX Runtime, int8")
    model.eval_onnx(input_sample=data[:2])
    note("ONNX Runtime, fp32")
    model.exit_onnx()
    note("PyTorch again")
    return {"outputs": outputs, "labels": labels}


if __name__ == "__main__":
    main()
