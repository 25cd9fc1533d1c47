"""Scripts that draw the front page and check the built pages."""

import ast
import importlib.util
import json
import shutil
import subprocess
import sys
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


def test_the_notebook_pages_have_the_code_of_the_notebooks():
    script = load_script("notebook_pages")
    for path, name in script.PAGES.items():
        cells = json.loads((ROOT / "examples" / path).read_text(encoding="utf-8"))["cells"]
        code = ["".join(each["source"]) for each in cells if each["cell_type"] == "code"]
        page = (ROOT / "docs" / "notebooks" / f"{name}.md").read_text(encoding="utf-8")
        shown = script.code_of(page)
        assert shown == [each for each in code if "find_spec" not in each], (
            f"run: python scripts/notebook_pages.py {path}"
        )


def test_one_address_reaches_setup_the_notebooks_and_leaves_no_trace(tmp_path):
    script = load_script("set_repository")
    files = ["setup.py", *(f"examples/{name}" for name in script.EXTRAS)]
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    before = [(tmp_path / name).read_text(encoding="utf-8") for name in files]
    script.set_repository(tmp_path, "")
    script.set_repository(tmp_path, "https://github.com/some/fork")
    script.set_repository(tmp_path, "https://github.com/owner/bigdl")
    for name in files:
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert text.count("https://github.com/owner/bigdl") == 1, name
        assert "some/fork" not in text, name
        if name == "setup.py":
            ast.parse(text)
    script.set_repository(tmp_path, "")
    assert [(tmp_path / name).read_text(encoding="utf-8") for name in files] == before


def test_pages_link_to_the_repository_if_its_address_is_set(tmp_path, monkeypatch):
    docs = tmp_path / "docs"
    for folder in ("_static", "_templates"):
        shutil.copytree(ROOT / "docs" / folder, docs / folder)
    shutil.copy(ROOT / "docs" / "conf.py", docs)
    (docs / "index.md").write_text(
        "# BigDL\n\n`examples/orca/quickstart.ipynb` and `examples/applications/nowcasting.ipynb`\n"
    )
    monkeypatch.setenv("BIGDL_REPOSITORY", "https://github.com/owner/bigdl")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", str(docs)]
    subprocess.run([*command, str(tmp_path / "html")], check=True, timeout=240)
    page = (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
    path = "github/owner/bigdl/blob/main/examples/orca/quickstart.ipynb"
    assert f"https://colab.research.google.com/{path}" in page
    assert "https://mybinder.org/v2/gh/owner/bigdl/HEAD?urlpath=lab/tree/examples/applic" in page
    assert 'href="https://github.com/owner/bigdl"' in page
    assert "colab.research.google.com/github/owner/bigdl/blob/main/examples/app" not in page


def test_published_versions_are_listed_and_the_stable_one_is_the_first_page(tmp_path):
    script = load_script("publish_site")
    for version in ("3.9.0", "3.10.0", "3.11.0rc1"):
        site = tmp_path / f"built-{version}"
        site.mkdir()
        (site / "index.html").write_text(f"<title>BigDL {version}</title>")
        names = script.publish(site, tmp_path / "all")
    assert names == ["3.11.0rc1", "3.10.0", "3.9.0"]
    assert json.loads((tmp_path / "all" / "versions.json").read_text()) == names
    assert "url=3.10.0/" in (tmp_path / "all" / "index.html").read_text()
    assert (tmp_path / "all" / "3.9.0" / "index.html").exists()
    (tmp_path / "built-3.9.0" / "index.html").write_text("<title>Other</title>")
    with pytest.raises(SystemExit, match="no version in its title"):
        script.publish(tmp_path / "built-3.9.0", tmp_path / "all")
