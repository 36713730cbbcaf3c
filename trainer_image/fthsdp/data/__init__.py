"""Which samples are trained when, each exactly once, and the texts that the recipes train on.

``sampler`` deals sample numbers to replicas, ``lanes`` those of streams that cannot be indexed, and ``policies`` says
how many, and what becomes of the learning rate; all three are pure. ``stream`` reads what was dealt; ``text`` is a
dataset of bytes.
"""
