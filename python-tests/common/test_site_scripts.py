"""Scripts that draw the front page and check the built pages."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_chart_of_the_front_page_shows_the_tables_of_the_benchmarks():
    script = load_script("draw_front_page")
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    drawn = (ROOT / "docs" / "speed.svg").read_text(encoding="utf-8")
    chart = script.draw_speed(page).svg(is_alone=True)
    assert chart == drawn, "run: python scripts/draw_front_page.py"
    with pytest.raises(LookupError, match="no number for 'Ray:', 'lukewarm', 'ratio'"):
        script.ratio(page, "Ray:", "lukewarm", "ratio")


def test_the_charts_of_the_gallery_show_the_tables():
    script, gallery = load_script("draw_front_page"), ROOT / "docs" / "gallery"
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    recommender = (gallery / "sequence-recommender.md").read_text(encoding="utf-8")
    for name, chart in script.draw_gallery(page, recommender).items():
        drawn = (gallery / f"{name}.svg").read_text(encoding="utf-8")
        assert chart.svg(is_alone=True) == drawn, "run: python scripts/draw_front_page.py"


def test_the_readme_states_ratios_of_the_benchmarks():
    script = load_script("draw_front_page")
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    stated = {
        "as a DataLoader": script.ratio(page, "Recommendation", "end to end, to `loader`", "1M"),
        "as eager PyTorch": script.ratio(
            page, "Inference:", "**Nano, `openvino_int8`**", "× eager"
        ),
        "as pandas": 7.1,
    }
    assert "it is 7.1 times as fast as pandas" in page
    for baseline, value in stated.items():
        assert f"{value:g} times as fast {baseline}" in readme


def test_links_to_nothing_are_found(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="folder/page.html#here">1</a> <a href="https://example.com/x">2</a>'
        '<a href="#">3</a> <a href="folder/page.html#there">4</a> <img src="picture.svg">'
    )
    (tmp_path / "folder" / "page.html").write_text(
        '<h1 id="here"></h1><a href="../index.html">1</a><a href="#gone">2</a>'
    )
    assert load_script("check_site").broken_links(tmp_path) == [
        "folder/page.html: link to #gone: the page has no such anchor",
        "index.html: link to folder/page.html#there: the page has no such anchor",
        "index.html: link to picture.svg: there is no such file",
    ]
