"""Sphinx builds docs/ into a searchable site: `make site`. Nothing is fetched from a network."""

project = "TSQP"
copyright = "the TSQP authors"  # noqa: A001 (the name that Sphinx reads)
extensions = ["myst_parser"]
exclude_patterns = ["examples"]
# Anchors of headings, as GitHub makes them. A link or anchor that leads nowhere is a warning, and
# `make site` makes warnings errors.
myst_heading_anchors = 4
html_theme = "furo"
html_title = "TSQP"
html_copy_source = False
# Examples with shell prompts, TOML fragments and diagrams: no guessing of languages.
highlight_language = "text"
