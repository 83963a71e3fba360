"""Measurements of this project, from the root of the repository:

python -m benchmark.headline --help                what README.md and docs/performance.md quote
python -m benchmark.measure.long_prompts --help    one module per further question
python -m benchmark.report --check                 tables and plots from the stored results
"""
