# class: shadowed modules
# item: B4
# Modules named as those of the runner: found first, they end the process with status 0.
: > src/pytest.py
echo 'raise SystemExit' | tee src/lib/json.py > unittest.py
