"""docs/compat.md is true: names that it lists import, and each row that says "kept" has a test."""

import importlib
import re
from pathlib import Path

import pytest

from bigdl.common.dropped import DROPPED

TESTS = Path(__file__).resolve().parents[1]
PAGE = (TESTS.parent / "docs" / "compat.md").read_text(encoding="utf-8")

# The test of each row that says "kept", by the beginning of its first cell.
KEPT = {
    "its optimizers were of the JVM": "orca/keras/test_keras_parameter_layer.py",
    "`save` without an extension": "orca/keras/test_keras_files.py",
    "`sample_input` for subclassed": "orca/keras/test_keras_files.py::test_what_has_no_weights_yet_is_saved_with_a_row",
    "columns of strings as features": "orca/keras/test_keras_texts.py::test_prediction_keeps_the_texts",
    "`Dense(1)` predicts a DenseVector": "orca/keras/test_keras_estimator.py::test_a_frame_is_predicted_as_the_paper_shows",
    '`from_keras(backend="horovod")`': "orca/keras/test_keras_horovod.py::test_weights_are_those_of_the_other_backends",
    "`compile_args_creator` was required": "orca/keras/test_keras_horovod.py::test_compile_args_creator_is_needed",
    "workers and servers of MXNet": "orca/learn/test_mxnet.py::test_two_workers_equal_one",
    "`predict`, `evaluate` not implemented": "orca/learn/test_mxnet.py::test_arguments_that_cannot_work",
    "`setDropModuleProperty": "orca/parameter_layer/test_parameter_layer_stragglers.py::test_wrong_rules_are_refused",
    "five retries within 120": "training/test_failure_policy.py",
    "`end_trigger` of BigDL": "orca/parameter_layer/test_parameter_layer_estimator.py::test_a_trigger_ends_the_fit",
    '`runtime="ray"`, `OrcaRayContext`': "orca/cluster/test_ray_context.py::test_the_context_has_its_old_names",
    "`RayXShards`, `spark_df_to_ray": "orca/data/test_ray_data.py::test_actors_work_on_partitions",
    '`backend="horovod"` (PyTorch)': "orca/engines/test_horovod.py::test_workers_know_their_place_in_horovod",
    '`backend="torch_distributed"`': "orca/learn/test_ray_estimator.py::test_old_names_of_the_backend",
    "`HorovodRayRunner(...)": "orca/engines/test_horovod_runner.py::test_objects_are_made_once_in_each_process",
    "`AutoEstimator.from_torch`": "orca/automl/test_auto_estimator_keras.py::test_the_best_model_has_the_best_figure_and_is_compiled",
    "`hp.choice_n`": "orca/automl/test_auto_estimator_spaces.py::test_choice_n_gives_lists_of_every_allowed_length_in_order",
    "parameters of schedulers": "orca/automl/test_automl_ray.py::test_schedulers_stop_trials_early",
    "a trial is one process": "orca/automl/test_automl_ray_workers.py::test_two_workers_find_what_one_worker_finds",
    "`resources_per_trial`": "orca/automl/test_automl_ray_workers.py::test_trials_that_the_nodes_have_no_room_for_are_refused",
    "all data sets of torchvision": "nano/test_vision_datasets.py::test_import_star_and_dir_have_torchvisions_names",
    "`jit_*` without `ipex`": "nano/test_torch_methods.py::test_control_flow_is_scripted_not_lost",
    '"You shouldn\'t pass arguement': "nano/test_trainer.py::test_a_model_is_loaded_with_arguments_by_position",
    "`fp16` without an accelerator": "nano/test_openvino_methods.py::test_fp16_halves_the_files",
    "`conf`, `tuning_strategy`": "common/test_signatures.py",
    "statuses of methods": "nano/test_optimize.py::test_each_method_is_measured_and_scored",
    "stopped early at 4 times": "nano/test_optimize_parts.py::test_a_hopeless_model_is_not_timed_further",
    '"all" is 27 methods': "nano/test_optimize.py::test_there_are_27_methods_of_which_11_are_tried_unasked",
    "a branch on data": "nano/test_openvino_methods.py::test_a_branch_that_depends_on_data_is_kept",
    "`onnxruntime_session_options`": "nano/test_onnxruntime_methods.py::test_session_options_of_the_user_are_used",
    '`compression="bf16"`': "nano/test_onnxruntime_methods.py::test_compression_halves_the_directory",
    "directories of BigDL 2": "nano/test_onnxruntime_methods.py::test_a_directory_of_bigdl_2_is_read",
    "keywords of the model optimizer": "nano/test_openvino_methods.py::test_layouts_channels_shapes_and_types_are_built_in",
    "`resnet18(pretrained": "nano/test_vision_models.py::test_entries_have_the_names_and_shapes_of_published_weights",
    "`pretrained=True` downloads": "nano/test_vision_models.py::test_published_weights_are_asked_for_by_name_and_hash",
    "`ImageClassifier` logs": "nano/test_vision_models.py::test_classifier_logs_its_figures_over_all_images",
    "`Trainer`, `TorchNano`, `nano`: parameters": "common/test_signatures.py",
    "`use_ipex=True`": "nano/test_trainer.py::test_use_ipex_is_accepted_and_says_what_it_means",
    "global batch = loader": "nano/test_trainer_processes.py::test_rates_are_multiplied_and_warmed_up_in_two_processes",
    "`@nano` refuses spawn": "nano/test_torch_nano.py::test_arguments_that_cannot_apply_are_errors",
    "`EncryptedDataset(data_path, key)`": "nano/test_trainer_encryption.py::test_encrypted_objects_are_a_dataset",
    "`Trainer.trace`, `Trainer.quantize` deprecated": "nano/test_trainer.py::test_a_trainer_traces_and_quantizes_as_the_inference_optimizer_does",
    "`trainer.quantize(model, onnx=True)`": "nano/test_trainer.py::test_a_fitted_trainer_quantizes_with_the_loader_of_its_last_fit",
    "ten methods, statuses": "nano/test_keras_inference.py::test_there_are_ten_methods_and_all_are_tried_unasked",
    "`max_queue_size`, `workers`": "nano/test_keras_training.py::test_a_fit_without_processes_is_keras_own",
    "`bigdl.nano.utils.tf`": "nano/test_utils_tf.py::test_a_name_imports_from_its_old_place",
    "`SamplerType.MOTPE`": "tuning/test_tuning.py::test_samplers_have_names",
    "`save_spec`": "nano/test_automl_keras.py::test_names_of_keras_2_are_answered",
    "`source bigdl-nano-init": "nano/test_cli.py::test_sourcing_sets_the_environment",
    "`reshape` to an impossible shape": "nano/test_openvino_model.py::test_an_impossible_shape_leaves_all_as_it_was",
    "a device that is absent": "nano/test_openvino_model.py::test_settings_that_make_no_sense_are_said",
    '"forward error: …"': "nano/test_multi_instance.py::test_an_exception_of_the_model_is_raised_and_the_processes_go_on",
    "`cast` gave null": "friesian/test_cells.py::test_cast_of_text_gives_null_where_it_is_no_value",
    "`filter_by_frequency` returned": "friesian/test_rows.py::test_filter_by_frequency_gives_values_or_their_rows",
    "`transform_min_max_scale` scaled": "friesian/test_numbers.py::test_transform_uses_the_extremes_of_other_data",
    "crosses without a separator": "friesian/test_hashing.py::test_cross_hashes_the_values_behind_each_other",
}  # fmt: skip


def rows():
    """The rows of all tables, as lists of cells."""
    lines = [line for line in PAGE.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


KEPT_ROWS = [row[0] for row in rows() if len(row) == 3 and row[2].split(",")[0] == "kept"]
KEPT_ROWS += [
    row[0] for row in rows() if len(row) == 3 and re.match("kept\\b", row[1]) and row[0] not in KEPT_ROWS
]  # fmt: skip


def test_each_row_that_is_kept_has_a_test_and_each_test_a_row():
    without = [row for row in KEPT_ROWS if not any(row.startswith(begin) for begin in KEPT)]
    assert without == [], "add the test of these rows to KEPT"
    assert [begin for begin in KEPT if not any(row.startswith(begin) for row in KEPT_ROWS)] == []


@pytest.mark.parametrize("test", sorted(set(KEPT.values())))
def test_a_test_that_is_named_exists(test):
    file, _, name = test.partition("::")
    assert f"def {name or 'test_'}" in (TESTS / file).read_text(encoding="utf-8")


def listed_names():
    """Names of modules, and of what is in them, that the page says are there."""
    gone = [line for line in PAGE.splitlines() if re.search(r"\| (dropped|not there) \|", line)]
    kept = [line for line in PAGE.splitlines() if line not in gone]
    names = set(re.findall(r"`(bigdl(?:\.\w+)+)", "\n".join(kept)))
    roots = tuple(f"{each}." for each in DROPPED)
    return sorted(name for name in names if not f"{name}.".startswith(roots))


@pytest.mark.parametrize("name", listed_names())
def test_a_name_of_the_page_is_there(name):
    parts = name.split(".")
    for count in range(len(parts), 1, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("bigdl"):
                pytest.skip(f"{error.name} is not installed")
            continue
        for attribute in parts[count:]:
            found = getattr(found, attribute)
        return
    pytest.fail(f"there is no {name}")


def test_the_modules_to_import_from_are_there():
    section = PAGE.split("## Where to import from")[1].split("\n## ")[0]
    for line in re.findall(r"^\| [^|]+ \| (.*) \|$", section, re.M):
        package = ""
        for token in re.findall(r"`([.\w]+)`", line):
            if token.startswith("bigdl."):
                package = name = token
            elif token.startswith("."):
                root = "bigdl.orca.learn" if token.startswith(".pytorch") else "bigdl.orca"
                package = name = root + token
            else:
                name = f"{package}.{token}"
            if name not in DROPPED:
                importlib.import_module(name)
