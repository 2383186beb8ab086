"""Sphinx builds the pages of this folder: `make docs`, warnings are errors."""

import os
import re
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

project = "gluon_syncbn"
author = "the gluon_syncbn authors"
_package = Path(__file__).parent.parent / "gluon_syncbn" / "__init__.py"
(release,) = re.findall(r'^__version__ = "(.+)"$', _package.read_text(encoding="utf-8"), re.M)
myst_enable_extensions = ["dollarmath"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.mathjax", "sphinx.ext.napoleon"]
exclude_patterns = ["draw_messages.py"]
html_theme = "furo"
html_title = "gluon_syncbn"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
myst_heading_anchors = 3
suppress_warnings = ["myst.xref_missing"]  # links out of this folder, to source files and the README
autodoc_member_order = "bysource"
napoleon_google_docstring = False
napoleon_use_rtype = False
napoleon_custom_sections = [("Inputs", "params_style"), ("Outputs", "params_style")]
default_role = "code"
