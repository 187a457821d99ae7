"""Idioms of users' losses and modules, by what they are about."""
