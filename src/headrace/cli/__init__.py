from headrace.cli.entry import main

__all__ = ["main"]
