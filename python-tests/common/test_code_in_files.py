"""Calls of the library that can run code from what they read, and what guards each of them.

A new one is added here with its guard, and to the table of SECURITY.md if it reads a file.
"""

import re
from collections import Counter
from pathlib import Path

import bigdl.common

SOURCE = Path(bigdl.common.__file__).parent.parent
CALL = re.compile(
    r"""(?:cloud)?pickle\.loads?\(|Unpickler\(|_unpickle_model\(|\.pickleFile\(|joblib\.|marshal\.
    |torch\.load\(|torch_load\(|jit\.load\b|export\.load\(|aoti_load_package\(|torch\.package
    |load_library\(|saving\.load_model\(|saved_model\.load\(|TFSMLayer\(|allow_pickle=True
    |yaml\.(?:unsafe_|full_)?load\w*\(|add_extension\(|custom_ops_library|trust_remote_code
    |(?<![\w.])(?:eval|exec)\((?!\))|runpy|exec_module""",
    re.VERBOSE,
)

IN_RUN = "comes from a process of the same run: a pipe, a broadcast, a folder or object of the run"
WEIGHTS = "weights_only=True"
GUARDED = {
    "runtime/messages.py": {"pickle.loads(": IN_RUN},
    "runtime/task.py": {"cloudpickle.loads(": IN_RUN},
    "runtime/failure.py": {"pickle.loads(": IN_RUN},
    "runtime/certificate.py": {"add_extension(": "of a certificate"},
    "runtime/serialization.py": {
        "Unpickler(": "plain data only",
        "pickle.load(": "trust= or the digest of the content",
    },
    "runtime/keras_objects.py": {"_unpickle_model(": IN_RUN, "Unpickler(": IN_RUN},
    "training/state.py": {"torch.load(": WEIGHTS},
    "training/keras/data.py": {"cloudpickle.loads(": IN_RUN},
    "training/keras/backends.py": {"cloudpickle.loads(": IN_RUN},
    "training/batches.py": {"cloudpickle.loads(": IN_RUN},
    "nano/acceleration/search/isolation.py": {"pickle.load(": IN_RUN},
    "nano/pytorch/training/shared_objects.py": {"Unpickler(": IN_RUN},
    "nano/pytorch/training/processes.py": {"pickle.loads(": IN_RUN},
    "nano/pytorch/frozen/features.py": {"torch.load(": WEIGHTS},
    "nano/pytorch/inference/accelerated.py": {"torch.load(": WEIGHTS},
    "nano/pytorch/inference/graphs.py": {
        "aoti_load_package(": "read_code, or made by this process",
        "jit.load": "read_code, or in a pickle of the same run",
    },
    "nano/pytorch/inference/pipeline.py": {"jit.load": IN_RUN},
    "nano/pytorch/encryption.py": {"torch_load(": "the caller's weights_only, True by default"},
    "nano/pytorch/vision/models/backbones.py": {"torch.load(": WEIGHTS},
    "nano/serving/runners.py": {"saving.load_model(": "safe_mode unless trust="},
    "nano/tf/training/processes.py": {"pickle.loads(": IN_RUN, "cloudpickle.loads(": IN_RUN},
    "nano/tf/inference/optimizer.py": {"pickle.loads(": IN_RUN},
    "nano/tf/inference/accelerated.py": {"saving.load_model(": "safe_mode unless trust="},
    "nano/tf/serialization.py": {"pickle.loads(": IN_RUN},
    "orca/automl/ray_workers.py": {"pickle.loads(": "checkpoints of a running search of Ray Tune"},
    "orca/engines/connect.py": {"cloudpickle.loads(": IN_RUN},
    "orca/inference/shipping.py": {"cloudpickle.loads(": IN_RUN},
    "orca/inference/runtimes.py": {
        "jit.load": "trust=",
        "export.load(": "trust=",
        "torch.load(": "trust=",
    },
    "orca/data/tables/scans.py": {"pickle.loads(": IN_RUN},
    "orca/data/xshards/spark.py": {
        ".pickleFile(": "signed by this user, or trust=",
        "cloudpickle.loads(": IN_RUN,
    },
    "orca/data/xshards/connect.py": {"cloudpickle.loads(": IN_RUN},
    "orca/learn/horovod.py": {"cloudpickle.loads(": IN_RUN},
    "orca/learn/pytorch/parts.py": {
        "torch.load(": "weights only unless trust=",
        "cloudpickle.loads(": "a copy within the process",
    },
    "orca/learn/pytorch/parameter_layer.py": {"cloudpickle.loads(": "a copy within the process"},
    "orca/learn/mxnet/program.py": {"pickle.load(": IN_RUN},
    "orca/learn/tf2/model_files.py": {"saving.load_model(": "safe_mode unless trust="},
    "orca/learn/nnframes/stages.py": {"cloudpickle.loads(": "trust=, or made by this process"},
    "orca/cluster/connect.py": {"cloudpickle.loads(": IN_RUN},
    "orca/parameter_layer/shuffle.py": {"cloudpickle.loads(": IN_RUN},
    "orca/parameter_layer/barrier.py": {"pickle.loads(": "from the driver, not from a worker"},
    "friesian/executors/arrow.py": {"pickle.load(": IN_RUN},
}


def calls_of(file):
    """The calls in a file, without comments and docstrings."""
    text = re.sub(r'"""(?s:.*?)"""|\s#.*', "", file.read_text())
    return Counter(match.group() for match in CALL.finditer(text))


def test_every_call_that_can_run_code_of_a_file_has_a_guard():
    known = {name: set(calls) for name, calls in GUARDED.items()}
    found = {}
    for file in sorted(SOURCE.rglob("*.py")):
        if calls := calls_of(file):
            found[str(file.relative_to(SOURCE))] = set(calls)
    assert found == known


def test_weights_are_read_as_weights_only():
    for name, calls in GUARDED.items():
        if WEIGHTS in calls.values():
            text = (SOURCE / name).read_text()
            loads = re.findall(r"torch\.load\([^\n]*\)", re.sub(r'"""(?s:.*?)"""', "", text))
            assert loads, name
            assert all("weights_only=True" in each for each in loads), name
