"""Which samples are trained when, each exactly once, and the texts that the recipes train on.

``sampler`` deals sample numbers to replicas and ``policies`` says how many, and what becomes of the learning rate; both
are pure. ``text`` is a dataset of bytes.
"""
