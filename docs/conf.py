"""Sphinx builds the pages of this folder: `make docs`, warnings are errors."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

project = "gluon_syncbn"
author = "the gluon_syncbn developers"
release = "0.1.0"
myst_enable_extensions = ["dollarmath"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["draw_messages.py"]
html_theme = "furo"
html_title = "gluon_syncbn"
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links out of this folder, to source files and the README
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Inputs", "params_style"), ("Outputs", "params_style")]
default_role = "code"
