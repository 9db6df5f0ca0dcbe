"""A history in which no version holds an answer, made of a repository's own as tasks make it."""

from __future__ import annotations

from pathlib import Path

from etude.grading.leaks import AnswerFingerprint
from etude.tasks import git_history


def rewrite(source: Path, base: str, target: Path, files: dict[str, bytes], answer: AnswerFingerprint) -> str:
    """Make `target`, a `.git` folder whose last commit holds exactly `files`; the id of that commit."""
    past = git_history.read(source, base, files, 50)
    held = {blob for blob in past.entries if answer.in_data(past.text(blob))}
    silent = [place for place, commit in enumerate(past.commits) if answer.in_data(commit.message)]
    made = git_history.folder(past, files, lambda path, blob: files[path] if blob in held else None, silent)
    for path, data in made.items():
        place = target / path.removeprefix(".git/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    return made[f".git/refs/heads/{past.branch}"].decode().strip()
