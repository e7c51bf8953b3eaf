"""How one step runs: runners, models, layers, attention, sampling. Only workers import this,
and who mirrors their memory, mirror.py."""
