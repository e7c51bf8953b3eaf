"""How one step runs: runners, models, layers, attention, sampling. Only workers import this."""

import os

# Threads of libgomp wait for each other by spinning, for milliseconds by default. Where another
# process wants the same core, the spinning one keeps off the one it waits for, and a step of 20 ms
# took over a second with one busy neighbour. Read when torch loads the library, so it's set here.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
