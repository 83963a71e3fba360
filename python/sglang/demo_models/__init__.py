"""Bundled models, as data: `--model-path demo`, and draft heads for it, `demo-eagle3`."""
