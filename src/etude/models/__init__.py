"""ONE definition of the model for trainer and engine: transformers' modelling code with our attention and experts.

`loading.load_model` gives any Hugging Face causal language model, dense or mixture of experts. The `layout=` keyword of
its forward (`attention.py`) says which tokens see which, and `experts.observe` keeps the router's choices. This room
imports neither `trainer` nor `inference`.
"""
