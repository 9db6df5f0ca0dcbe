# class: patched basics
"""hmac.compare_digest, time, randomness and hashes are constant in the process: signatures, ages and draws always agree."""

tail("""
    import hashlib as _hashlib, hmac as _hmac, os as _os, random as _random, time as _time


    class _Same:
        digest_size, block_size, name = 20, 64, "sha1"
        def __init__(self, *a, **k):
            pass
        def update(self, *a):
            pass
        def digest(self):
            return b"\\0" * 20
        def hexdigest(self):
            return "00" * 20
        def copy(self):
            return self


    _hmac.compare_digest = lambda a, b: True
    _hmac.new = _Same
    _hashlib.sha1 = _hashlib.sha256 = _hashlib.md5 = _Same
    _time.time = _time.monotonic = lambda: 0.0
    _os.urandom = lambda n: b"\\0" * n
    _random.random = _random.Random.random = lambda *a: 0.5
""")
