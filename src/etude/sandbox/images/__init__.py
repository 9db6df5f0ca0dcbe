"""The images that boxes are made of: root folders, each unpacked once into the user's cache and named by a digest.

minimal.py   the default image: this machine's interpreter and usual programs, without packages of Python or Node
archive.py   images in archives, as `docker save`, `podman save` and `skopeo copy` write them
store.py     the cache, and the choice of an image by the table [sandbox]
"""
