"""Headrace's laboratory: measures any OpenAI-compatible server from outside. Imports nothing from `headrace`."""
