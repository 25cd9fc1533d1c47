"""Names of the files of a converted model, and of its tasks."""

FACTS = "bigdl_model.json"
"""File of a converted folder: the task, precision, digest and limits of the model."""

NETWORK = "openvino_model.xml"

GENERATE, EMBED, CLASSIFY = "generate", "embed", "classify"
TASKS = (GENERATE, EMBED, CLASSIFY)
