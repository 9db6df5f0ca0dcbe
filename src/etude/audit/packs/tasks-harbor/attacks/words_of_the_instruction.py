# class: empty answers
"""Every file that the instruction names holds what stands in quotes or code there."""

words = re.findall(r"`([^`\n]+)`|\"([^\"\n]+)\"|'([^'\n]+)'", TEXT)
words = [w for group in words for w in group if w and w not in NAMED]
for name in NAMED:
    if not pathlib.Path(name).exists():
        write(name, "\n".join(words[:1] or ["1"]) + "\n", 0o755)
