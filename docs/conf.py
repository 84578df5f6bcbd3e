"""How Sphinx builds the site from docs/: MyST Markdown, the Furo theme, nothing from the network."""

project = "Quantry"
copyright = "the authors of Quantry, Apache-2.0"  # noqa: A001 - Sphinx's name
extensions = ["myst_parser"]
exclude_patterns = ["constraints.txt", "hashes.txt", "pictures/*.txt"]
myst_heading_anchors = 3  # page.md#a-heading is a link, and one that leads nowhere is an error
myst_enable_extensions = ["colon_fence"]
smartquotes = False  # --json stays --json
html_theme = "furo"
html_title = "Quantry"
html_static_path = ["site"]
html_css_files = ["tables.css"]
html_show_sphinx = False
html_copy_source = False
highlight_language = "bash"
pygments_style = "default"
pygments_dark_style = "github-dark"
