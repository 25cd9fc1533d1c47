#!/usr/bin/env python3
"""Draw the charts of docs/index.md and of the gallery, from tables and from a program.

python scripts/draw_front_page.py
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from bigdl.common.drawing import Chart

DOCS = Path(__file__).resolve().parents[1] / "docs"

# Per bar: label and baseline; heading, row and column of the cell in the table.
BARS = [
    (
        "Spark DataFrame to tensors, first epoch",
        "Ray Data",
        ("8 numeric columns", "first epoch, `bigdl` to `ray`", "median"),
    ),
    (
        "NeuMF on MovieLens 1M, from table to HR@10",
        "DataLoader",
        ("Recommendation", "end to end, to `loader`", "1M"),
    ),
    (
        "Small network on Parquet files",
        "Ray Train",
        ("Ray:", "warm, end to end", "ratio"),
    ),
    (
        "ResNet50 from scratch on JPEGs, bf16",
        "plain Lightning",
        ("Training:", "**Nano**", "× plain", -1),
    ),
    (
        "ResNet50 transfer learning, int8",
        "plain Lightning",
        ("Training:", "**Nano, int8**", "× plain"),
    ),
    (
        "ResNet50 inference, batch 1, int8",
        "eager PyTorch",
        ("Inference:", "**Nano, `openvino_int8`**", "× eager"),
    ),
    (
        "Prediction of a DataFrame by ResNet50, int8",
        "predict without it",
        ("Accelerated prediction", '`accelerate="openvino_int8"`', "ratio, wall"),
    ),
    (
        "CNN of Keras, inference, int8",
        "model.predict",
        ("Keras models", "**OpenVINO int8**", "× `model.predict`"),
    ),
]
_NUMBER = re.compile(r"\d+(\.\d+)?")


def cells(line: str) -> list[str]:
    """Return the cells of a table row in Markdown."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def ratio(page: str, heading: str, row: str, column: str, which: int = 0) -> float:
    """Return the number in a table cell of a page.

    Parameters
    ----------
    page : str
        Text in Markdown.
    heading, row, column : str
        Start of the heading, first cell of the row, name of the column.
    which : int
        Index of the match, if several cells match.
    """
    matches, header, is_below = [], [], False
    before = ""
    for line in page.splitlines():
        if line.startswith("#"):
            is_below = line.lstrip("# ").startswith(heading)
        elif is_below and line.startswith("|---"):
            header = cells(before)
        elif is_below and line.startswith("|") and cells(line)[0] == row and column in header:
            number = _NUMBER.search(cells(line)[header.index(column)])
            matches += [float(number.group())] if number else []
        before = line
    if not matches:
        raise LookupError(f"benchmarks.md has no number for {heading!r}, {row!r}, {column!r}")
    return matches[which]


def draw_speed(page: str) -> Chart:
    """Return a bar chart of the ratios in the tables of a page."""
    values = [ratio(page, *cell) for _, _, cell in BARS]
    step, left, right = 40.0, 12.0, 560.0
    chart = Chart(640, step * len(BARS) + 32)
    unit = (right - left) / max(values)
    for index, ((label, baseline, _), value) in enumerate(zip(BARS, values, strict=True)):
        top = step * index + 8
        chart.text(f"{label}, compared with {baseline}", left, top + 12)
        chart.box(left, top + 17, unit, 14, "#bbb", f"{baseline}: 1")
        chart.box(left + unit, top + 17, unit * (value - 1), 14, "#1f77b4", f"BigDL: {value:g}")
        chart.text(f"{value:g} ×", left + unit * value + 8, top + 29)
    bottom = step * len(BARS) + 22
    chart.text("gray: the baseline; blue: the speedup of BigDL", left, bottom)
    return chart


def draw_bars(title: str, values: dict[str, float], unit: str, baselines: bool = True) -> Chart:
    """Return a small bar chart; with `baselines`, the bars after the first one are gray."""
    step, left, right = 44.0, 16.0, 300.0
    chart = Chart(400, step * len(values) + 44)
    chart.text(title, left, 22)
    for index, (label, value) in enumerate(values.items()):
        top = step * index + 36
        width = (right - left) * value / max(values.values())
        chart.text(label, left, top + 12)
        colour = "#bbb" if index and baselines else "#1f77b4"
        chart.box(left, top + 17, width, 14, colour, f"{label}: {value:g} {unit}")
        chart.text(f"{value:g} {unit}".strip(), left + width + 8, top + 29)
    return chart


def draw_gallery(page: str, recommender: str) -> dict[str, Chart]:
    """Return the charts of the gallery by name, from the tables of two pages."""
    pictures = {
        "one Spark program": "one program, OpenVINO in float32",
        "mapInPandas, eager PyTorch": "`mapInPandas`, eager PyTorch",
        "Spark, files and process pools": "connector: Spark, files, pools of processes",
    }
    models = {
        "SASRec": "**SASRec**",
        "Markov": "Markov (successors of the last film)",
        "most popular items": "most popular items",
    }
    (latency,) = re.findall(r"^\| latency at .*\| (p50 .*) \|$", page, re.MULTILINE)
    return {
        "image-pipeline": draw_bars(
            "pictures per second",
            {k: ratio(page, "Image pipeline", row, "pictures/s") for k, row in pictures.items()},
            "",
        ),
        "streaming-speech": draw_bars(
            "from the sound in Kafka to its answer",
            {f"{n} % of the sounds": float(s) for n, s in re.findall(r"p(\d+) ([\d.]+)", latency)},
            "s",
            baselines=False,
        ),
        "sequence-recommender": draw_bars(
            "NDCG@10 of the next film, MovieLens 100K",
            {k: ratio(recommender, "Sequence rec", row, "NDCG@10") for k, row in models.items()},
            "",
        ),
    }


def draw_fit(page: str, path: Path) -> None:
    """Run the program of a page and copy its chart to `path`."""
    (program,) = re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", program], cwd=folder, check=True)
        shutil.copy(Path(folder, "fit.svg"), path)


def main() -> None:
    """Write all charts to docs."""
    page, gallery = (DOCS / "benchmarks.md").read_text(), DOCS / "gallery"
    draw_speed(page).write(DOCS / "speed.svg", "", "")
    charts = draw_gallery(page, (gallery / "sequence-recommender.md").read_text())
    for name, chart in charts.items():
        chart.write(gallery / f"{name}.svg", "", "")
    draw_fit((DOCS / "index.md").read_text(), DOCS / "fit.svg")


if __name__ == "__main__":
    main()
