"""Bundled models, as data: `--model-path demo`."""
