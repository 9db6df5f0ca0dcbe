"""Whether a box can be told from a user's machine: fingerprints, a classifier, and what gives a box away."""
