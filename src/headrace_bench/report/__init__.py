"""Folders, tables, plots and pages: what is shown of a run."""
