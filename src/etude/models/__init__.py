"""ONE definition for trainer and engine: transformers' own modelling code with our attention and experts functions.

`load_model` gives any Hugging Face causal language model, dense or mixture of experts; the `layout=` keyword of its
forward (`attention.py`) says which tokens see which, and `experts.record` keeps the router's choices.
"""
