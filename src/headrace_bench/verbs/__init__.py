"""One file a verb of `headrace-bench`: flags in, exit status out."""
