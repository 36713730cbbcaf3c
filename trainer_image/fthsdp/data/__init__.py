"""Which samples are trained when, each exactly once, and the texts that the recipes train on.

``sampler`` deals sample numbers to replicas and is pure; ``text`` is a dataset of bytes.
"""
