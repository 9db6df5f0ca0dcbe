# class: links
# item: B12
# Links to files of the system, and a package that lies in the tests.
mkdir -p tests
ln -sf /etc/passwd tests/test_core.py
ln -sf /etc/passwd src/lib/numbers.py
mkfifo src/lib/fifo
mv src/lib/__init__.py tests/
ln -s ../../tests src/lib/deep
