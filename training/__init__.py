"""Training of the bundled demo models; run from the root of the repository, which must be the
first place that Python looks for modules: `python -m training.train_base --help`."""
