"""Fine-tune a classifier on labelled tickets and serve it.

    python examples/llm/ticket_classifier.py --rows 1000

A LoRA adapter of an encoder learns the kinds of tickets. The trained model classifies the tickets
of a DataFrame, and a model server answers requests with the same files in int8.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import packaged_models
import tickets
from peft import LoraConfig

from bigdl.nano.serving import Client, ModelRepository, ModelServer
from bigdl.orca.learn.pytorch import Estimator


def ask_server(model, texts):
    """Save a classifier, serve it on a free port, and return its labels for texts."""
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder, "model"))
        repository = ModelRepository(Path(folder, "model"), name="tickets")
        repository.load_all()
        with (
            ModelServer(repository, http_port=0, grpc_port=None) as server,
            Client(f"http://127.0.0.1:{server.http_port}") as client,
        ):
            logits = client.infer("tickets", np.array(texts, object))
    return np.array(model.labels)[logits.argmax(1)]


def main(argv=None):
    """Train, predict and serve; return the accuracy on new tickets and that of the server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--encoder", help="folder of an encoder")
    options = parser.parse_args(argv)

    est = Estimator.from_transformers(
        packaged_models.encoder(options.encoder),
        task="classification",
        peft=LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"]),
        learning_rate=2e-3,
        backend="local",
    )
    labelled, new = tickets.generate(options.rows), tickets.generate(200, seed=1)
    est.fit(labelled, epochs=options.epochs, batch_size=32, text_col="text", label_cols="kind")
    predicted = est.predict(new, "text")
    accuracy = float((predicted["label"] == new["kind"]).mean())
    print(f"Accuracy on {len(new)} new tickets: {accuracy:.3f}")

    kinds = ask_server(est.text_model("int8"), new["text"].tolist())
    of_server = float((kinds == new["kind"]).mean())
    print(f"Accuracy of the server in int8: {of_server:.3f}")
    return accuracy, of_server


if __name__ == "__main__":
    main()
