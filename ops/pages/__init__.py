"""How pages and pictures look: templates, the parts of pages, and the style of figures."""
