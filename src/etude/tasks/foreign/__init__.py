"""Harbor task folders by other authors: read, given an image without Docker, checked by their own solution, graded.

`folder.py` reads a folder, `dockerfile.py` its Dockerfile, `image.py` makes the tree of its boxes, `build.py` runs the
gates and writes a dataset, `dataset.py` loads a dataset. Their tests run in `grading/harbor.py`. A folder with needs
that boxes cannot meet is refused with the reason (`FolderRefused`).
"""
