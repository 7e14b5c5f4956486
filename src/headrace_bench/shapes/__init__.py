"""Model files of a published model's shape with random weights: what a machine needs for it can be timed, no more."""
