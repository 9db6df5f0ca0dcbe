# class: copies
"""Another file anywhere in the box, packed or not, that holds a function of this name: its text is taken."""

import zipfile

wanted = f"def {NAME[-1]}("
texts = []
for root in {str(pathlib.Path.cwd()), *sys.path, "/usr/lib", "/opt", "/site", "/home", "/tmp", "/var"}:
    for path in pathlib.Path(root).rglob("*") if root and pathlib.Path(root).is_dir() else ():
        try:
            if path.resolve() == PATH.resolve() or not path.is_file() or path.stat().st_size > 2_000_000:
                continue
            if path.suffix in (".whl", ".zip", ".egg"):
                with zipfile.ZipFile(path) as archive:
                    texts += [archive.read(n).decode() for n in archive.namelist() if n.endswith(PATH.name)]
            elif path.name.split(".")[0].lstrip(".") == PATH.stem:
                texts.append(path.read_text())
        except (OSError, ValueError, zipfile.BadZipFile):
            continue
for text in texts:
    try:
        matches = [node for names, node in functions(ast.parse(text)) if names[-len(NAME) :] == NAME]
    except (SyntaxError, ValueError):
        continue
    if wanted in text and matches and ast.dump(matches[-1]) != ast.dump(FUNCTION):
        body("\n".join(map(ast.unparse, matches[-1].body)) + "\n")
        break
