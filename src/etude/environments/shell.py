"""The live box: a persistent shell on a pseudo-terminal, in namespaces of its own."""
