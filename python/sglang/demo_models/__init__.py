"""Bundled models, as data: `--model-path demo`, draft heads for it, `demo-eagle3`, and a draft
model, `demo-draft`."""
