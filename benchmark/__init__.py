"""Measurements of this project. Run from the root of the repository, which must be the first place
that Python looks for modules:

    python -m benchmark.measure.decode_steps --help    one module per question; it stores a result
    python -m benchmark.report --check                 tables and plots from the stored results
"""
