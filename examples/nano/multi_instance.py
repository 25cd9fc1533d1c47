"""Run one model in several processes to increase the throughput.

    python examples/nano/multi_instance.py --processes 4

The model is converted to a runtime, and each process runs a copy of it on separate cores. The
outputs equal those of the model, in the order of the inputs.
"""

import argparse
import time

import torch

from bigdl.nano.pytorch import InferenceOptimizer
from bigdl.nano.pytorch.vision.models import resnet18


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--accelerator", choices=["openvino", "onnxruntime", "jit"])
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--size", type=int, default=128)
    options = parser.parse_args(argv)

    torch.manual_seed(0)
    model = resnet18().eval()
    batches = [
        torch.rand(options.batch_size, 3, options.size, options.size)
        for _ in range(options.batches)
    ]
    if options.accelerator:
        model = InferenceOptimizer.trace(model, batches[0], accelerator=options.accelerator)

    with InferenceOptimizer.get_context(model):
        model(batches[0])
        started = time.perf_counter()
        expected = [model(each) for each in batches]
        one = time.perf_counter() - started

    with InferenceOptimizer.to_multi_instance(model, num_processes=options.processes) as several:
        several(batches[: options.processes])  # warm up each process
        started = time.perf_counter()
        outputs = several(batches)
        many = time.perf_counter() - started

    images = options.batches * options.batch_size
    difference = max(float((a - b).abs().max()) for a, b in zip(expected, outputs, strict=True))
    print(f"1 process: {images / one:.0f} images/s")
    print(f"{options.processes} processes: {images / many:.0f} images/s")
    print(f"largest difference {difference:.1g}")
    return {"outputs": len(outputs), "difference": difference}


if __name__ == "__main__":
    main()
