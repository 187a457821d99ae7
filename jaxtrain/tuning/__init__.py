"""Search for settings: spaces, studies, trials. A trial is a run; what is particular about it is here."""
