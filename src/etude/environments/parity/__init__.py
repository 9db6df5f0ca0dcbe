"""Whether an agent can tell a box from a user's machine: fingerprints, a classifier on them, and what gives a box away."""
