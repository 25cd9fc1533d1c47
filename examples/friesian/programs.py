"""Options shared by the programs of this folder."""

import argparse

from bigdl.orca import init_orca_context


def parse(
    argv,
    description,
    *,
    size,
    epochs,
    lr=0.01,
    batch_size=256,
    data=None,
    output=False,
    choices=None,
):
    """Parse the options of a program.

    Parameters
    ----------
    argv : list of str or None
    description : str
    size : dict of str to int
        Options of the generated data, with their defaults.
    data : str, optional
        What a folder given as ``--data-dir`` has.
    output : bool
        Whether there is a folder for what the program writes.
    choices : dict of str to list of str, optional
        Options that are one of some words, of which the first is the default.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default in size.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, words in (choices or {}).items():
        parser.add_argument(f"--{name}", choices=words, default=words[0])
    if data is not None:
        parser.add_argument("--data-dir", help=f"folder of {data}, instead of generated data")
    if output:
        parser.add_argument("--output", help="output folder")
    parser.add_argument("--cluster-mode", default="local")
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--memory", default="2g")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=epochs)
    parser.add_argument("--batch-size", type=int, default=batch_size)
    parser.add_argument("--lr", type=float, default=lr)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def start(options):
    """Start Orca, or use the Spark that is running."""
    return init_orca_context(options.cluster_mode, cores=options.cores, memory=options.memory)


def share_of_best(predicted, label, best=0.1):
    """Return the share of label 1 among the rows with the highest predictions.

    Parameters
    ----------
    predicted : pyspark.sql.DataFrame
        What ``predict`` returned.
    label : str
    best : float
        The share of the rows that are taken.
    """
    frame = predicted.select(label, "prediction").toPandas()
    return float(frame.nlargest(int(len(frame) * best), "prediction")[label].mean())


def report(metrics):
    """Print metrics and return them."""
    for name, value in metrics.items():
        print(f"{name} {value:.4f}" if isinstance(value, float) else f"{name} {value}")
    return metrics
