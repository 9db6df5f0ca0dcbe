# class: environment
# item: B5
# Programs that stand for python and pip, and a hook of git.
mkdir -p .venv/bin .git/hooks bin
printf '#!/bin/sh\nexit 0\n' > .venv/bin/python
echo '#!/bin/sh' > .git/hooks/pre-commit
echo 'exit 0' > bin/pip
