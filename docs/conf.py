"""Sphinx configuration; ``make docs`` builds the pages and takes a warning for an error."""

from importlib.metadata import version as installed_version

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
html_js_files = ["copy.js"]
html_logo = "_static/logo.svg"
html_favicon = "_static/logo.svg"
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # types are in the numpydoc sections
autosummary_generate = True
numpydoc_show_class_members = False
