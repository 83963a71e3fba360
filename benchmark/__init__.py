"""Measurements of this project, from the root of the repository:

python -m benchmark.measure.decode_steps --help    one module per question; it stores a result
python -m benchmark.report --check                 tables and plots from the stored results
"""
