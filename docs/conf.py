"""Sphinx configuration; ``make docs`` builds the pages and takes a warning for an error.

With the address of the published site in the variable ``BIGDL_DOCS_URL``, ``sitemap.xml`` is
written. With the address of the repository, by ``scripts/set_repository.py`` or in
``BIGDL_REPOSITORY``, the pages have links to it, and notebooks have links to Colab and Binder.
"""

import html
import os
import re
from importlib.metadata import metadata
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

project = "BigDL"
author = "The BigDL contributors"
copyright = author  # Sphinx reads this name
release = installed_version("bigdl")
version = ".".join(release.split(".")[:2])

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "numpydoc",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"BigDL {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_js_files = ["copy.js", "versions.js"]
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_show_sourcelink = False
pygments_dark_style = "github-dark"  # furo's default underlines the names of modules
html_baseurl = os.environ.get("BIGDL_DOCS_URL", "")
if html_baseurl:
    html_baseurl = html_baseurl.rstrip("/") + "/"

_SOURCES = [
    url.removeprefix("Source, ")
    for url in metadata("bigdl").get_all("Project-URL") or []
    if url.startswith("Source, ")
]
_REPOSITORY = os.environ.get("BIGDL_REPOSITORY", next(iter(_SOURCES), "")).rstrip("/")
_GITHUB = "https://github.com/"
if _REPOSITORY.startswith(_GITHUB):
    html_theme_options = {
        "source_repository": f"{_REPOSITORY}/",
        "source_branch": "main",
        "source_directory": "docs/",
    }
html_context = {"repository": _REPOSITORY}
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        *(f"sidebar/{name}.html" for name in ("brand", "search", "scroll-start", "navigation")),
        *(f"sidebar/{name}.html" for name in ("scroll-end", "versions")),
    ]
}

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types are in the numpydoc sections
autosummary_generate = True
numpydoc_show_class_members = False

_SENTENCE = (
    "BigDL trains and serves PyTorch and Keras models on Spark DataFrames, Parquet files and Ray "
    "Datasets, and makes models several times faster on one machine."
)


def _add_card(app: Any, page: str, template: str, context: dict[str, Any], doctree: Any) -> None:
    """Add the tags with which other sites show a link to a page: title, first sentence, picture."""
    first = _SENTENCE
    if doctree is not None and page != "index":
        paragraphs = (
            each.astext()
            for section in doctree.children
            for each in section.children
            if each.tagname == "paragraph"
        )
        first = " ".join(next(paragraphs, _SENTENCE).split())
    title = re.sub(r"<[^>]*>", "", context.get("title", project))
    tags = {
        "og:type": "article",
        "og:site_name": project,
        "og:title": html.unescape(title),
        "og:description": first[:200],
        "og:image": f"{html_baseurl}_static/card.png",
    }
    if html_baseurl:
        tags["og:url"] = f"{html_baseurl}{page}.html"
    lines = [f'<meta property="{k}" content="{html.escape(v)}">' for k, v in tags.items()]
    lines += [
        f'<meta name="description" content="{html.escape(first[:200])}">',
        '<meta name="twitter:card" content="summary_large_image">',
    ]
    context["metatags"] = "\n".join([context.get("metatags", ""), *lines])


def _write_sitemap(app: Any, error: Exception | None) -> None:
    """Write the addresses of all pages for search engines."""
    if error is not None or not html_baseurl or app.builder.name != "html":
        return
    pages = sorted(app.env.found_docs)
    urls = "".join(f"<url><loc>{html.escape(html_baseurl + p)}.html</loc></url>\n" for p in pages)
    Path(app.outdir, "sitemap.xml").write_text(
        '<?xml version="1.0" encoding="utf-8"?>\n'
        f'<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{urls}</urlset>\n',
        encoding="utf-8",
    )


def _index_codes(app: Any, page: str, source: list[str]) -> None:
    """Add the error codes to the index, so that the search finds their table first."""
    heading = "## Error codes\n"
    if page != "guides/troubleshooting" or heading not in source[0]:
        return
    before, after = source[0].split(heading, 1)
    codes = re.findall(r"^\| `([a-z0-9]+(?:-[a-z0-9]+)*)` \|", after, re.MULTILINE)
    entries = "".join(f"   ! single: {code}\n" for code in codes)
    block = f"\n```{{eval-rst}}\n.. index::\n{entries}```\n"
    source[0] = before + heading + block + after


def _link_notebooks(app: Any, page: str, source: list[str]) -> None:
    """Add links to Colab and Binder after the path of a notebook."""
    if not _REPOSITORY.startswith(_GITHUB):
        return
    name = _REPOSITORY.removeprefix(_GITHUB)

    def links(match: re.Match[str]) -> str:
        path = match[1]
        binder = f"https://mybinder.org/v2/gh/{name}/HEAD?urlpath=lab/tree/{path}"
        out = [f"[open in Binder]({binder})"]
        if not path.startswith("examples/applications/"):  # these import modules of their folder
            colab = f"https://colab.research.google.com/github/{name}/blob/main/{path}"
            out.insert(0, f"[open in Colab]({colab})")
        return f"{match[0]} ({', '.join(out)})"

    source[0] = re.sub(r"`(examples/[\w/]+\.ipynb)`", links, source[0])


def setup(app: Any) -> None:
    """Connect the functions of this file to the build."""
    app.connect("source-read", _index_codes)
    app.connect("source-read", _link_notebooks)
    app.connect("html-page-context", _add_card)
    app.connect("build-finished", _write_sitemap)
