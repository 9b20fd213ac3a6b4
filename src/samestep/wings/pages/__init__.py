"""The one renderer of pages: a self-contained HTML file of an answer, a verdict, charts and tables."""
