"""Makes the data that nano is trained on, and its untrained model: `python -m models.make_nano`."""
