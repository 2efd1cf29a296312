"""How many samples a training needs to its target: statistics of recorded runs, without a network.

`batches.py` fits the samples to a target by batch. `curves.py` reads a metric's curve. `noise.py`
estimates the critical batch from gradient noise. `answers/` multiplies their steps by the times
that `simulation/` predicts.
"""
