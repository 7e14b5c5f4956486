"""Headrace: a language-model server for people who are waiting."""

__version__ = "0.1.0"
