"""Hyperparameter search: spaces, studies, trials. A trial is an ordinary run in a study's folder."""
