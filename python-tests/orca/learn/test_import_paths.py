"""Programs for BigDL 2.x import their names from where they always did."""

import subprocess
import sys

import pytest
from refusals import refused

PATHS = {
    "bigdl.dllib.feature.common": ["ChainedPreprocessing", "SeqToTensor"],
    "bigdl.dllib.nn.criterion": ["CrossEntropyCriterion", "MSECriterion"],
    "bigdl.dllib.nn.layer": ["Linear", "Model", "Sequential"],
    "bigdl.dllib.nncontext": [
        "ZooContext",
        "getOrCreateSparkContext",
        "get_optimizer_version",
        "init_nncontext",
        "init_spark_conf",
        "init_spark_on_k8s",
        "init_spark_on_k8s_cluster",
        "init_spark_on_local",
        "init_spark_on_yarn",
        "init_spark_on_yarn_cluster",
        "init_spark_standalone",
        "set_optimizer_version",
        "stop_spark_standalone",
    ],
    "bigdl.dllib.nnframes": [
        "NNClassifier",
        "NNClassifierModel",
        "NNEstimator",
        "NNImageReader",
        "NNModel",
    ],
    "bigdl.dllib.nnframes.nn_classifier": [
        "NNClassifier",
        "NNClassifierModel",
        "NNEstimator",
        "NNModel",
    ],
    "bigdl.dllib.nnframes.nn_image_reader": ["NNImageReader"],
    "bigdl.dllib.nnframes.tree_model": [
        "LightGBMClassifier",
        "LightGBMClassifierModel",
        "LightGBMRegressor",
        "LightGBMRegressorModel",
        "XGBClassifier",
        "XGBClassifierModel",
        "XGBRegressor",
        "XGBRegressorModel",
    ],
    "bigdl.dllib.utils": ["log4Error"],
    "bigdl.dllib.utils.common": ["get_node_and_core_number"],
    "bigdl.dllib.utils.file_utils": [
        "get_remote_file_to_local",
        "is_local_path",
        "put_local_file_to_remote",
    ],
    "bigdl.dllib.utils.log4Error": ["invalidInputError", "invalidOperationError"],
    "bigdl.dllib.utils.utils": ["detect_conda_env_name"],
    "bigdl.orca": ["OrcaContext", "init_orca_context", "stop_orca_context"],
    "bigdl.orca.common": ["OrcaContext", "SafePickle", "init_orca_context", "stop_orca_context"],
    "bigdl.orca.cpu_info": ["schedule_workers"],
    "bigdl.orca.data": ["SharedValue", "SparkXShards", "XShards", "read_images"],
    "bigdl.orca.data.file": [
        "exists",
        "get_remote_dir_to_local",
        "get_remote_file_to_local",
        "listdir",
        "load_numpy",
        "makedirs",
        "open_image",
        "open_text",
        "put_local_file_to_remote",
        "write_text",
    ],
    "bigdl.orca.data.image": [
        "read_images",
        "read_tfrecord",
        "write_tfrecord",
    ],
    "bigdl.orca.data.image.parquet_dataset": [
        "ParquetDataset",
        "read_parquet",
        "write_from_directory",
        "write_mnist",
        "write_parquet",
        "write_voc",
    ],
    "bigdl.orca.data.image.preprocessing": ["read_images"],
    "bigdl.orca.data.image.utils": ["DType", "FeatureType", "SchemaField", "chunks"],
    "bigdl.orca.data.pandas": ["read_csv", "read_json", "read_parquet"],
    "bigdl.orca.data.ray_xshards": ["RayXShards"],
    "bigdl.orca.data.shard": ["SparkXShards", "XShards"],
    "bigdl.orca.data.transformer": ["MinMaxScaler", "StandardScaler", "StringIndexer"],
    "bigdl.orca.data.utils": ["partition_get_data_label", "process_spark_xshards"],
    "bigdl.orca.inference": ["InferenceModel"],
    "bigdl.orca.learn.metrics": [
        "AUC",
        "MSE",
        "Accuracy",
        "BinaryCrossEntropy",
        "Precision",
        "Recall",
    ],
    "bigdl.orca.learn.optimizers": ["SGD", "Adam"],
    "bigdl.orca.learn.optimizers.schedule": ["Poly", "SequentialSchedule", "Warmup"],
    "bigdl.orca.learn.pytorch": ["Estimator", "TrainingOperator"],
    "bigdl.orca.learn.pytorch.callbacks": ["Callback", "MainCallback"],
    "bigdl.orca.learn.pytorch.callbacks.base": ["Callback"],
    "bigdl.orca.learn.pytorch.callbacks.maincallback": ["MainCallback"],
    "bigdl.orca.learn.pytorch.callbacks.maxsteps": ["MaxstepsCallback"],
    "bigdl.orca.learn.pytorch.callbacks.model_checkpoint": ["ModelCheckpoint"],
    "bigdl.orca.learn.pytorch.callbacks.tensorboard": ["TensorBoardCallback"],
    "bigdl.orca.learn.pytorch.callbacks.tqdm": ["TqdmCallback"],
    "bigdl.orca.learn.pytorch.callbacks.wandb": ["WandbLoggerCallback"],
    "bigdl.orca.learn.pytorch.estimator": ["Estimator"],
    "bigdl.orca.learn.trigger": ["EveryEpoch", "SeveralIteration"],
    "bigdl.orca.learn.utils": [
        "array2dict",
        "convert_predict_rdd_to_dataframe",
        "maybe_dataframe_to_xshards",
    ],
    "bigdl.orca.ray": ["OrcaRayContext", "RayContext"],
    "bigdl.orca.ray.utils": ["resource_to_bytes"],
    "bigdl.orca.torch": ["TorchLoss", "TorchModel", "TorchOptim"],
}

# modules that programs import with a star, and names that they then use
STARS = {
    "bigdl.dllib.nncontext": ["init_nncontext", "init_spark_conf"],
    "bigdl.dllib.nnframes": ["NNClassifier", "NNEstimator"],
    "bigdl.dllib.nnframes.tree_model": ["LightGBMClassifier", "XGBClassifier"],
    "bigdl.dllib.nn.criterion": ["CrossEntropyCriterion", "MSECriterion"],
    "bigdl.dllib.nn.layer": ["Linear", "Sequential"],
    "bigdl.dllib.utils.common": ["get_node_and_core_number"],
    "bigdl.dllib.utils.log4Error": ["invalidInputError", "invalidOperationError"],
    "bigdl.orca.common": ["init_orca_context"],
    "bigdl.orca.data.transformer": ["MinMaxScaler", "StringIndexer"],
}


@pytest.mark.parametrize("module", PATHS)
def test_every_name_is_at_its_old_place(module):
    namespace: dict = {}
    exec(f"from {module} import {', '.join(PATHS[module])}", namespace)
    assert set(PATHS[module]) <= set(namespace)


@pytest.mark.parametrize("module", STARS)
def test_a_star_brings_the_names(module):
    namespace: dict = {}
    exec(f"from {module} import *", namespace)
    assert [name for name in STARS[module] if name not in namespace] == []


@pytest.mark.slow
def test_no_path_starts_an_engine():
    code = (
        f"import importlib\nfor name in {list(PATHS)}: importlib.import_module(name)\n"
        "from pyspark import SparkContext\n"
        "assert SparkContext._gateway is None\n"
        "import threading\nassert threading.active_count() == 1, threading.enumerate()"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


@pytest.mark.parametrize("name", ["LightGBMClassifier", "XGBClassifier", "XGBRegressorModel"])
def test_trees_come_from_their_own_packages(name, monkeypatch):
    from bigdl.common.errors import MissingExtraError
    from bigdl.dllib.nnframes import tree_model

    for package in ("xgboost", "xgboost.spark", "synapse", "synapse.ml.lightgbm"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{name} is .*(pip install|SynapseML)"):
        getattr(tree_model, name)({"num_workers": 1})


def test_workers_share_no_core():
    from bigdl.common.cpu import usable_cores
    from bigdl.orca.cpu_info import schedule_workers

    usable = usable_cores()
    for count in range(1, len(usable) + 1):
        for given in (schedule_workers(count), schedule_workers(count, 1)):
            cores = [core for each in given for core in each]
            assert len(given) == count
            assert len(set(cores)) == len(cores)
            assert set(cores) <= set(usable)
    with refused("resource-limit"):
        schedule_workers(len(usable) + 1, 1)
    with refused("argument-value", "1"):
        schedule_workers(0)


def test_summaries_of_pytorch_import_no_tensorflow(tmp_path):
    pytest.importorskip("tensorboard")
    program = f"""
import contextlib, sys
from bigdl.orca.learn.pytorch.callbacks.tensorboard import open_writer

with contextlib.ExitStack() as opened:
    open_writer(opened, {str(tmp_path)!r}).add_scalar("loss", 1.0, 1)
assert "tensorflow" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.glob("events.*"))
