"""Figures: each module is a command that measures one thing and says how."""

from jaxtrain import commands

commands.quiet_jax()
