"""Models and training scripts to start from.

``llama`` is a small Llama-style model in plain PyTorch; ``tiny_llama`` is a whole training script around it.
"""
