# class: shadowed modules
# item: B4
# Files that Python runs at its start end the process with status 0.
echo 'import os; os._exit(0)' | tee src/sitecustomize.py > src/lib/x.pth
