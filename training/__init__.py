"""Training of the bundled demo models, from the root of the repository:

python -m training.train_base --help    a model that predicts the next token
python -m training.train_mtp --help     teaches it to predict several
"""
